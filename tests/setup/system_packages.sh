#!/usr/bin/env bash
# Install the Debian packages named as arguments, or else those that the tests use and this machine lacks.
# Without the right to do so, say which are missing and go on: tests that need them skip and say why.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin # where sshd and ip are, for ordinary users too

lacking() { # COMMAND PACKAGE
    command -v "$1" >/dev/null || echo "$2"
}

if [ $# -gt 0 ]; then
    packages=("$@")
else
    mapfile -t packages < <(
        lacking mpirun.openmpi openmpi-bin
        lacking mpirun.mpich mpich
        lacking nft nftables
        lacking sshd openssh-server
        lacking ssh openssh-client
        lacking ip iproute2
        lacking /lib/ld-musl-x86_64.so.1 musl
        ls /usr/lib/*/libnss_wrapper.so >/dev/null 2>&1 || echo libnss-wrapper
        lacking fusermount3 fuse3
        lacking unshare util-linux
        lacking ps procps
        lacking openssl openssl
        lacking cmake cmake
        lacking c++ g++
        lacking make make
        lacking chromium chromium
        lacking tmux tmux
    )
fi
[ ${#packages[@]} -gt 0 ] || exit 0

give_up() {
    echo "system: missing: ${packages[*]} ($1); install with: apt-get install ${packages[*]}" >&2
    exit 0
}

command -v apt-get >/dev/null || give_up "no apt-get here"
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || give_up "neither root nor sudo without a password"
    exec sudo -n bash "$0" "${packages[@]}"
fi

echo "system: installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
policy=/usr/sbin/policy-rc.d # while this file says 101, no package starts a daemon: tests run an sshd of their own
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
log=$(mktemp)
if ! { apt-get -q update && apt-get -q install -y --no-install-recommends "${packages[@]}"; } </dev/null >"$log" 2>&1; then
    grep -E '^(E|W):' "$log" >&2 || tail -5 "$log" >&2
    rm -f "$log"
    give_up "apt-get failed"
fi
rm -f "$log"
