#!/usr/bin/env bash
# Make the images that the tests of containers start from, with neither a registry nor a Dockerfile of ours:
#   base    this machine's release of Debian with Python, as an ordinary image has it
#   torch   the same with torch, numpy and mpi4py: a user's training image
# and beside them a folder of wheels, from which images are built without a network. Prints the names of both, the
# folder, and the configuration of podman's storage. That is one of our own, so nothing of the user's podman is
# touched; what is in it is made anew after a week, and what builds left there goes away.
#   PYTHON           the Python whose pip downloads the wheels (default: .venv/bin/python)
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); ours is its folder trainer-launch-images
#   PIP_ARGS         further options for pip
# Needs root, podman, runc, netavark, aardvark-dns, iptables, debootstrap. Ends with 3 where it cannot, and says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
python=${PYTHON:-.venv/bin/python}
PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "images: $1" >&2
    exit 3
}
last_of() { # FILE: its last line that says something
    grep -v '^[[:space:]]*$' "$1" | tail -1
}
[ "$(id -u)" = 0 ] || fail "only root can make containers; run this as root (make test-containers)"
for tool in podman runc iptables debootstrap; do
    command -v "$tool" >/dev/null || fail "there is no $tool; apt-get install podman runc netavark aardvark-dns iptables catatonit debootstrap"
done

home=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-images
mkdir -p "$home"
exec 9>"$home/lock"
flock -w 1800 9 || fail "somebody has been making the images for half an hour" # being made already: waited for
cat >"$home/storage.conf" <<END
[storage]
driver = "overlay"
graphroot = "$home/store"
runroot = "/run/trainer-launch-images"
END
export CONTAINERS_CONF=$here/../containers/containers.conf CONTAINERS_STORAGE_CONF=$home/storage.conf
podman() { timeout 600 podman "$@" </dev/null 9>&-; } # what it leaves running must not keep the lock

# shellcheck source=/dev/null
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
packages=(numpy mpi4py psutil pydantic-settings nvidia-ml-py)
pinned=$(grep -E "^(torch|pydantic|$(IFS='|' && echo "${packages[*]}"))==" "$root/constraints.txt")
key=$({ echo "$suite $pinned"; cat "$0"; } | sha256sum | cut -c1-12)
base=localhost/trainer-launch-test/base:$key
torch=localhost/trainer-launch-test/torch:$key
cache=$home/$key
wheels=$cache/wheels
mkdir -p "$cache"
log=$cache/log
work=$(mktemp -d)
trap 'umount -q "$work" || true; rm -rf "$work"' EXIT

podman info >"$log" 2>&1 || fail "podman does not work here: $(last_of "$log")"
podman image prune -a -f --filter until=168h >/dev/null 2>&1 || true
podman image prune -f >/dev/null 2>&1 || true
find "$home" -mindepth 1 -maxdepth 1 -name '????????????' ! -name "$key" -mtime +7 -exec rm -rf {} +

if ! podman image exists "$base"; then
    echo "images: making Debian's" >&2
    mount -t tmpfs -o size=2g,mode=755 tmpfs "$work" 2>/dev/null || true # dpkg syncs every file
    # From where apt of this machine has its own main packages.
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "Codename: $suite" 2>/dev/null | head -1 || true)
    timeout 900 debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
        "$suite" "$work/debian" ${mirror:+"$mirror"} </dev/null >"$log" 2>&1 || fail "debootstrap failed: $(last_of "$log")"
    rm -rf "$work"/debian/var/cache/apt/archives/*.deb "$work"/debian/var/lib/apt/lists/*
    # pip finds wheels where builds mount them; nothing that is built here looks for a registry.
    tar -C "$work/debian" -c . | timeout 600 podman import -q --change 'ENV PIP_NO_INDEX=1' \
        --change 'ENV PIP_FIND_LINKS=/wheelhouse' - "$base" >"$log" 2>&1 9>&- || fail "podman cannot import an image: $(last_of "$log")"
fi
podman run --rm --network none "$base" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' >"$cache/python" 2>"$log" ||
    fail "podman cannot run a container here: $(last_of "$log")"

if [ ! -e "$wheels/.ready" ]; then
    echo "images: downloading wheels" >&2
    version=$(sed -n 's/^torch==//p' "$root/constraints.txt")
    for build in "$version+cpu" "$version"; do # as tests/setup/venv.sh has it
        rm -rf "$wheels"
        # shellcheck disable=SC2086
        timeout 900 "$python" -m pip --disable-pip-version-check download -q -d "$wheels" -c "$root/constraints.txt" \
            --python-version "$(cat "$cache/python")" --only-binary :all: ${PIP_ARGS:-} \
            "torch==$build" "${packages[@]}" 'flit_core>=3.11,<5' 'setuptools>=68' wheel \
            </dev/null >"$log" 2>&1 && break
    done
    [ -d "$wheels" ] || fail "pip cannot get the wheels: $(grep -m1 -i '^error' "$log" || last_of "$log")"
    touch "$wheels/.ready"
fi

if ! podman image exists "$torch"; then
    echo "images: installing torch" >&2
    # As the images that PyTorch publishes: into the system's Python. All processors compile.
    cat >"$work/Containerfile" <<END
FROM $base
ENV PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -m pip install --no-compile --no-cache-dir -q torch numpy mpi4py \
    && { python3 -m compileall -q -j 0 /usr/local/lib || true; }
END
    podman build -q --network none -v "$wheels:/wheelhouse:ro" -t "$torch" -f "$work/Containerfile" "$work" \
        >"$log" 2>&1 || fail "torch cannot be installed: $(last_of "$log")"
fi
printf '%s\n' "$base" "$torch" "$wheels" "$home/storage.conf"
