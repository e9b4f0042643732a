#!/usr/bin/env bash
# Run a command of this tree in the root of another release of Debian, which debootstrap makes once, in the user's cache.
# The command sees this tree, the user's caches, pyenv's Pythons, pip's settings and the network at their own paths;
# what else it writes is forgotten, and all that it started ends with it.
#   debian.sh SUITE PACKAGE[,PACKAGE...] COMMAND [ARGUMENT...]
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); ours is its folder trainer-launch-debian
# Needs root and debootstrap. Ends with 3 where the root cannot be made, and says why.
set -euo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd)
suite=$1 packages=ca-certificates,$2
caches=${XDG_CACHE_HOME:-$HOME/.cache}
PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "debian: there is no root of Debian $suite: $1" >&2
    exit 3
}
[ "$(id -u)" = 0 ] || fail "only root can make it"
command -v debootstrap >/dev/null || fail "there is no debootstrap; apt-get install debootstrap"

root=$caches/trainer-launch-debian/$suite-$(sha256sum <<<"$packages" | cut -c1-12)
mkdir -p "$(dirname "$root")"
exec 9>"$root.lock"
flock 9 # one that is being made already is waited for
if [ ! -e "$root/.ready" ]; then
    echo "debian: installing $suite into $root; this takes minutes, once" >&2
    rm -rf "$root"
    # From where apt of this machine has its own main packages.
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | head -1 || true)
    timeout 1800 debootstrap --variant=minbase --include="$packages" "$suite" "$root" ${mirror:+"$mirror"} \
        </dev/null >"$root.log" 2>&1 || fail "debootstrap failed ($root.log): $(tail -1 "$root.log")"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    touch "$root/.ready"
fi
exec 9>&-

inside() { # as process 1 of a namespace of its own: all mounts and processes go with it
    local work=/mnt path
    export -nf inside # or the command would have it among its variables
    mount -t tmpfs tmpfs "$work"
    mkdir "$work/upper" "$work/work" "$work/root"
    mount -t overlay -o "lowerdir=$root,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
    cd "$work/root"
    mount -t proc proc proc
    for path in /sys /dev; do mount --rbind "$path" ".$path"; done
    for path in /tmp /run; do mount -t tmpfs tmpfs ".$path"; done
    chmod 1777 tmp
    for path in /etc/hosts /etc/resolv.conf /etc/ssl/certs /etc/pip.conf /etc/xdg/pip "$(pyenv root 2>/dev/null)" "$caches" "$tree"; do
        [ -e "$path" ] || continue
        if [ -d "$path" ]; then mkdir -p ".$path"; else touch ".$path"; fi
        mount --bind "$path" ".$path"
    done
    pivot_root . mnt # not chroot: nsenter goes to the root of the namespace
    cd "$tree"
    umount -l /mnt
    "$@"
}
export -f inside
export root caches tree PATH
exec unshare --mount --pid --fork --kill-child --mount-proc bash -euc 'inside "$@"; exit' debian "${@:3}"
