#!/usr/bin/env bash
# Make a virtual environment with one framework, once, and say where its Python is. What is in it: the requirements of
# frameworks/NAME.txt beside this file, and what this package itself needs for `rehearse -f`, but not the package: the
# tree under test comes by PYTHONPATH. One whose requirements say "# shares torch" sees the packages of the Python that
# made it, too. It is kept in the user's cache, named for what it was made of.
#   frameworks.sh NAME [NAME...]   makes these, prints a line for each; without a name: all there are
#   PYTHON           the Python to make it with (default: .venv/bin/python)
#   REQUIREMENTS     the folder of the NAME.txt, where it is another: benchmarks/peers
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); what CI has to keep is its folder trainer-launch-frameworks
#   PIP_ARGS         further options for pip
# Ends with 3 where one cannot be made here, and says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-.venv/bin/python}
requirements=${REQUIREMENTS:-$here/frameworks}

names=("$@")
if [ $# = 0 ]; then
    for file in "$requirements"/*.txt; do names+=("$(basename "$file" .txt)"); done
fi

# Our own requirements, one a line; Python 3.10 reads TOML only with what pip brings.
ours=$("$python" - "$here/../../pyproject.toml" <<'END'
import sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
project = tomllib.loads(open(sys.argv[1], encoding="utf-8").read())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["local"], sep="\n")
END
) || { echo "frameworks: $python cannot read pyproject.toml; run make venv, or name another as PYTHON" >&2; exit 3; }

make_one() {
    local name=$1 wanted key cache venv log shared
    wanted=$requirements/$name.txt
    [ -e "$wanted" ] || { echo "frameworks: there is no $wanted" >&2; exit 2; }
    shared=
    if grep -q '^# shares torch' "$wanted"; then
        shared=$("$python" -c 'import sysconfig, importlib.metadata as m; m.version("torch"); print(sysconfig.get_path("purelib"))' \
            2>/dev/null) || { echo "frameworks: $python has no torch that $name could share" >&2; exit 3; }
    fi
    # What the shared packages have is not installed again, so that another environment is needed without it.
    key=$({ echo "$shared"; [ -z "$shared" ] || "$python" -m pip --disable-pip-version-check list --format freeze; "$python" -c 'import platform, sys; print(sys.version, platform.machine())'; echo "$ours"; cat "$wanted"; } |
        sha256sum | cut -c1-16)
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-frameworks
    venv=$cache/$name-$key
    log=$cache/$name.log
    mkdir -p "$cache"
    exec 9>"$cache/$name.lock"
    flock 9 # one that is being made already is waited for
    if [ ! -e "$venv/.ready" ]; then
        echo "frameworks: installing $name into $venv; this takes minutes, once" >&2
        rm -rf "$venv"
        if ! "$python" -m venv "$venv" >"$log" 2>&1; then
            echo "frameworks: $python cannot make environments: $(tail -1 "$log")" >&2
            exit 3
        fi
        if [ -n "$shared" ]; then
            echo "$shared" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
        fi
        # A shared torch is seen by builds only without isolation, where they need a setuptools that can make wheels.
        # shellcheck disable=SC2086
        if [ -n "$shared" ] && ! "$venv/bin/python" -m pip --disable-pip-version-check install -q ${PIP_ARGS:-} \
            'setuptools>=70.1' >"$log" 2>&1; then
            echo "frameworks: pip cannot install $name, which needs setuptools ($log): $(tail -1 "$log")" >&2
            exit 3
        fi
        # shellcheck disable=SC2086
        if ! echo "$ours" | env -u PYTHONPATH -u PIP_USER ${shared:+PIP_NO_BUILD_ISOLATION=0} "$venv/bin/python" -m pip --disable-pip-version-check install -q \
            ${PIP_ARGS:-} -r "$wanted" -r /dev/stdin >"$log" 2>&1; then
            echo "frameworks: pip cannot install $name ($log): $(grep -m1 -i '^error' "$log" || tail -1 "$log")" >&2
            exit 3
        fi
        touch "$venv/.ready"
    fi
    exec 9>&-
    echo "$venv/bin/python"
}

# All at once, as each waits for downloads; what they print comes in the order of the names.
printed=$(mktemp -d)
trap 'rm -rf "$printed"' EXIT
declare -A made
for name in "${names[@]}"; do
    (make_one "$name") >"$printed/$name" &
    made[$name]=$!
done
worst=0
for name in "${names[@]}"; do
    status=0
    wait "${made[$name]}" || status=$?
    if [ $status -gt $worst ]; then worst=$status; fi
    cat "$printed/$name"
done
exit $worst
