#!/usr/bin/env bash
# Build kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl from Debian's source package, once:
# Debian 12 has 1.20, with all that it needs. Prints the folder of the programs.
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); ours is its folder trainer-launch-kubernetes
# The build takes 20 minutes on two cores and 5 GB of disk while it runs; 0.4 GB are kept.
# Ends with 3 where there is nothing to build it with or from, and says what is missing.
set -euo pipefail
PACKAGES="golang-go golang-github-modern-go-reflect2-dev dpkg-dev make rsync"
PROGRAMS="kubelet kube-apiserver kube-controller-manager kube-scheduler kubectl"
REFLECT2=github.com/modern-go/reflect2

fail() {
    echo "kubernetes: $1" >&2
    exit 3
}
home=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-kubernetes
cache=$home/$(sha256sum <"$0" | cut -c1-12)
mkdir -p "$home"
exec 9>"$home/lock"
flock -w 3600 9 || fail "somebody has been building for an hour" # being built already: waited for
if [ ! -e "$cache/.ready" ]; then
    for tool in go dpkg-source make rsync; do
        command -v "$tool" >/dev/null || fail "there is no $tool; apt-get install $PACKAGES"
    done
    [ -d "/usr/share/gocode/src/$REFLECT2" ] || fail "there is no reflect2 for Go; apt-get install $PACKAGES"
    rm -rf "$cache"
    work=$cache/work
    log=$home/build.log
    mkdir -p "$cache/bin" "$work/lists/partial" "$work/gopath/src/k8s.io"

    # From where apt of this machine has its own main packages.
    # shellcheck source=/dev/null
    suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' "Codename: $suite" 2>/dev/null | head -1 || true)
    [ -n "$mirror" ] || fail "apt has no packages of Debian's ${suite:-release} here"
    echo "deb-src $mirror $suite main" >"$work/sources.list"
    sources=(apt-get -q -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
        -o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=root)
    if ! { cd "$work" && "${sources[@]}" update && "${sources[@]}" source --download-only kubernetes; } </dev/null >"$log" 2>&1; then
        fail "apt-get cannot get the source package kubernetes: $(grep -m1 '^E:' "$log" || tail -1 "$log")"
    fi
    tree=$work/gopath/src/k8s.io/kubernetes # where Go wants it
    dpkg-source --no-check -x "$work"/kubernetes_*.dsc "$tree" >>"$log" 2>&1
    # With Go 1.18 or newer the vendored 1.0.1 crashes the API server at the first custom resource.
    rm -rf "$tree/vendor/$REFLECT2"
    cp -r "/usr/share/gocode/src/$REFLECT2" "$tree/vendor/$REFLECT2"

    echo "kubernetes: building; this takes 20 minutes, once" >&2
    version=$(sed -n 's/^Version: .*really\([0-9.]*\)-.*/\1/p' "$work"/kubernetes_*.dsc | head -1)
    IFS=. read -r major minor _ <<<"$version"
    # shellcheck disable=SC2086
    if ! env -C "$tree" HOME="$work" GOPATH="$work/gopath" GOCACHE="$work/gocache" GO111MODULE=off CGO_ENABLED=0 GOFLAGS=-p=2 \
        KUBE_GIT_VERSION="v$version" KUBE_GIT_COMMIT=debian KUBE_GIT_TREE_STATE=clean KUBE_GIT_MAJOR="$major" KUBE_GIT_MINOR="$minor" \
        nice -n 19 make WHAT="$(printf 'cmd/%s ' $PROGRAMS)" </dev/null >>"$log" 2>&1 9>&-; then
        tail -20 "$log" >&2
        echo "kubernetes: the build failed; all it said is in $log" >&2
        exit 1
    fi
    for program in $PROGRAMS; do
        mv "$tree/_output/local/bin/linux/$(go env GOARCH)/$program" "$cache/bin"
    done
    rm -rf "$work"
    find "$home" -mindepth 1 -maxdepth 1 -name '????????????' ! -path "$cache" -exec rm -rf {} + # of an older script
    touch "$cache/.ready"
fi
echo "$cache/bin"
