#!/usr/bin/env bash
# Build Horovod against the torch that is installed, once, and say where it lies: a folder for PYTHONPATH. Its wheel
# and that folder are kept in the user's cache, named for what they were built with; the environment is not changed.
#   PYTHON           the Python to build for (default: .venv/bin/python)
#   XDG_CACHE_HOME   where caches are (default: ~/.cache); what CI has to keep is its folder trainer-launch-horovod
#   PIP_ARGS         further options for pip
# Ends with 3 where there is nothing to build it with or from, and says what is missing.
set -euo pipefail
VERSION=0.28.1
python=${PYTHON:-.venv/bin/python}
key=$("$python" - <<'EOF'
import importlib.metadata, platform, sys
print(importlib.metadata.version("torch"), sys.implementation.cache_tag, platform.machine(), sep="-")
EOF
) || { echo "horovod: $python has no torch to build against" >&2; exit 3; }
cache=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-horovod/$VERSION-$key
site=$cache/site

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # a build that runs already is waited for
if [ -e "$site/.ready" ]; then
    echo "$site"
    exit 0
fi

pip() { "$python" -m pip --disable-pip-version-check -q "$@" ${PIP_ARGS:-}; }

compiler=$(command -v "${CXX:-c++}" || true)
if ! ls "$cache"/horovod-*.whl >/dev/null 2>&1; then
    for tool in "${compiler:-${CXX:-c++}}" cmake make; do
        command -v "$tool" >/dev/null || { echo "horovod: there is no $tool to build it with" >&2; exit 3; }
    done
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # Horovod's CMake files ask for C++14, torch's headers for a newer one: the last -std on a line counts. Without
    # debugging information and the costly optimisations it takes half the time and memory.
    printf '#!/bin/sh\nexec "%s" "$@" -std=c++20 -g0 -O1\n' "$compiler" >"$work/c++"
    chmod +x "$work/c++"
    log=$cache/build.log
    if ! pip download --no-deps --no-build-isolation --no-binary horovod -d "$work" "horovod==$VERSION" \
        </dev/null >"$log" 2>&1; then
        echo "horovod: pip cannot get its sources: $(tail -1 "$log")" >&2
        exit 3
    fi
    echo "horovod: building $VERSION against torch; this takes minutes, once" >&2
    if ! env CXX="$work/c++" TMPDIR="$work" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_GPU_OPERATIONS= MAKEFLAGS="-j$(nproc)" \
        "$python" -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation --no-cache-dir \
        -w "$cache" "$work/horovod-$VERSION.tar.gz" </dev/null >"$log" 2>&1; then
        tail -20 "$log" >&2
        echo "horovod: the build failed; all it said is in $log" >&2
        exit 1
    fi
fi
rm -rf "$site"
# What else it needs (psutil, yaml, packaging) the environment has.
pip install --no-deps --target "$site" "$cache"/horovod-*.whl cloudpickle </dev/null >&2
touch "$site/.ready"
echo "$site"
