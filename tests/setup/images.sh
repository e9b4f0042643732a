#!/usr/bin/env bash
# Make the images that the tests of containers start from, once, with neither a registry nor a Dockerfile of ours:
#   base    Debian with Python, as an ordinary image has it
#   torch   the same with torch, numpy and mpi4py: a user's training image
# and beside them a folder of wheels, from which images are built without a network. Prints the names and the folder.
#   PYTHON           the Python whose pip downloads the wheels (default: .venv/bin/python)
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); the wheels are in its folder trainer-launch-images
#   PIP_ARGS         further options for pip
# Needs root, podman, runc, netavark, aardvark-dns, iptables, debootstrap. Ends with 3 where it cannot, and says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
python=${PYTHON:-.venv/bin/python}
export CONTAINERS_CONF=$here/../containers/containers.conf
PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "images: $1" >&2
    exit 3
}
[ "$(id -u)" = 0 ] || fail "only root can make them"
for tool in podman runc iptables debootstrap; do
    command -v "$tool" >/dev/null || fail "there is no $tool"
done

key=$({ "$python" -c 'import sys; print(sys.version_info[:2])'; cat "$0" "$root/constraints.txt"; } | sha256sum | cut -c1-12)
base=localhost/trainer-launch-test/base:$key
torch=localhost/trainer-launch-test/torch:$key
cache=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-images/$key
wheels=$cache/wheels
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # images that are being made already are waited for
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! podman image exists "$base"; then
    echo "images: making Debian's, once" >&2
    mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | head -1)
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates bookworm "$work/debian" ${mirror:+"$mirror"} \
        </dev/null >"$cache/debootstrap.log" 2>&1 || fail "debootstrap failed: $(tail -1 "$cache/debootstrap.log")"
    rm -rf "$work"/debian/var/cache/apt/archives/*.deb "$work"/debian/var/lib/apt/lists/*
    # pip finds wheels where builds mount them; nothing that is built here looks for a registry.
    tar -C "$work/debian" -c . | podman import -q --change 'ENV PIP_NO_INDEX=1' --change 'ENV PIP_FIND_LINKS=/wheelhouse' - "$base" >/dev/null
fi

if [ ! -e "$wheels/.ready" ]; then
    echo "images: downloading wheels, once" >&2
    version=$(sed -n 's/^torch==//p' "$root/constraints.txt")
    for build in "$version+cpu" "$version"; do # as tests/setup/venv.sh has it
        rm -rf "$wheels"
        # shellcheck disable=SC2086
        "$python" -m pip --disable-pip-version-check download -q -d "$wheels" -c "$root/constraints.txt" ${PIP_ARGS:-} \
            "torch==$build" numpy mpi4py psutil pydantic-settings nvidia-ml-py 'setuptools>=68' wheel \
            </dev/null >"$cache/pip.log" 2>&1 && break
    done
    [ -d "$wheels" ] || fail "pip cannot get the wheels: $(grep -m1 -i '^error' "$cache/pip.log" || tail -1 "$cache/pip.log")"
    touch "$wheels/.ready"
fi

if ! podman image exists "$torch"; then
    echo "images: installing torch, once" >&2
    printf 'FROM %s\nRUN python3 -m pip install --break-system-packages --no-cache-dir -q torch numpy mpi4py\n' "$base" \
        >"$work/Containerfile"
    podman build -q --network none -v "$wheels:/wheelhouse:ro" -t "$torch" -f "$work/Containerfile" "$work" \
        </dev/null >"$cache/torch.log" 2>&1 || fail "torch cannot be installed: $(tail -1 "$cache/torch.log")"
fi
printf '%s\n%s\n%s\n' "$base" "$torch" "$wheels"
