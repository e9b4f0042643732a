#!/usr/bin/env bash
# Make a virtual environment with each Python that this package supports and this machine has, once, with all that tests
# need but torch, and this tree's package in it. Prints a line for each: where its Python is. They are kept in the
# user's cache, named for what they were made of.
#   pythons.sh VERSION [VERSION...]   as in 3.10; python3.10 on PATH, or what pyenv has of it
#   TORCH            the requirement for torch, which is installed as well
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); ours is its folder trainer-launch-pythons
#   PIP_ARGS         further options for pip
# One that cannot be found or made is named, and left out; ends with 3 then.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
torch=${TORCH:-}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
unset PYTHONPATH PYTHONHOME

works() { "$1" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1; }

find_python() { # VERSION: the path of such a Python
    local found
    for found in "$(command -v "python$1" || true)" "$(pyenv_has "$1")"; do
        if [ -n "$found" ] && works "$found" "$1"; then
            echo "$found"
            return
        fi
    done
    return 1
}
pyenv_has() { # pyenv's python3.10 only says that there is one, unless that version is chosen
    local full
    full=$(pyenv latest "$1" 2>/dev/null) && echo "$(pyenv prefix "$full" 2>/dev/null)/bin/python$1" || true
}

install() { # LOG PYTHON WHAT...
    # Another torch than that of the constraints may be wanted.
    # shellcheck disable=SC2086
    "$2" -m pip install -q -c <(grep -v '^torch==' "$root/constraints.txt") ${PIP_ARGS:-} "${@:3}" >"$1" 2>&1 </dev/null
}

reason() { # LOG: why pip gave up
    grep -m1 -i '^error' "$1" || tail -1 "$1"
}

wanted() { # what pyproject.toml asks for
    sed -n '/^requires = /p; /^dependencies = /p; /^.project.optional-dependencies/,/^.project.scripts/p' "$root/pyproject.toml"
}

fail() { # VERSION WHY
    echo "pythons: $1 is left out: $2" >&2
    exit 3
}

make_one() { # VERSION
    local name=${torch:+torch-}$1 python key cache venv log
    python=$(find_python "$1") || fail "$1" "there is no python$1 with venv and ensurepip here"
    key=$({ "$python" -VV; echo "$torch"; grep -v '^#' "$root/constraints.txt"; wanted; } | sha256sum | cut -c1-16)
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-pythons
    venv=$cache/$name-$key
    log=$cache/$name.log
    mkdir -p "$cache"
    exec 9>"$cache/$name.lock"
    flock 9 # one that is being made already is waited for
    if [ ! -e "$venv/.ready" ]; then
        echo "pythons: installing into $venv; this takes a minute, once${torch:+, and with torch minutes}" >&2
        find "$cache" -mindepth 1 -maxdepth 1 -type d -name "$name-*" -mtime +7 -exec rm -rf {} +
        rm -rf "$venv"
        "$python" -m venv "$venv" >"$log" 2>&1 || fail "$1" "$python cannot make environments: $(tail -1 "$log")"
        if [ -n "$torch" ]; then
            install "$log" "$venv/bin/python" "$torch" || fail "$1" "pip cannot install torch ($log): $(reason "$log")"
        fi
        install "$log" "$venv/bin/python" "$root[dev,gpu,local,mpi]" ||
            fail "$1" "pip cannot install what tests need ($log): $(reason "$log")"
        touch "$venv/.ready"
    fi
    touch "$venv" # it is in use
    # The package of this tree: another tree's may be there.
    install "$log" "$venv/bin/python" --no-deps --no-build-isolation --editable "$root" ||
        fail "$1" "pip cannot install the package ($log): $(reason "$log")"
    exec 9>&-
    echo "$venv/bin/python"
}

[ $# -gt 0 ] || { echo "pythons: which? Name versions, as in 3.10" >&2; exit 2; }
worst=0
for version in "$@"; do
    set +e
    (set -e; make_one "$version")
    status=$?
    set -e
    if [ $status -gt $worst ]; then worst=$status; fi
done
exit $worst
