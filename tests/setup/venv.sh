#!/usr/bin/env bash
# Create or complete .venv in the current folder: this package (editable), torch, and the development tools.
#   PYTHON     the Python to use (default: the first one found that is new enough)
#   TORCH      the requirement for torch (default: the CPU build where pip can find one)
#   PIP_ARGS   further options for pip, for example where to look for packages
set -euo pipefail
here=$(dirname "$0")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

find_python() {
    local candidate fallback=""
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3}; do
        new_enough "$candidate" || continue
        if can_make_venv "$candidate"; then
            echo "$candidate"
            return
        fi
        fallback=${fallback:-$candidate}
    done
    echo "$fallback"
}

python=$(find_python)
if [ -z "$python" ]; then
    echo "venv: no Python 3.10 or newer found${PYTHON:+ as $PYTHON}; install one, or name it: make venv PYTHON=..." >&2
    exit 1
fi
if ! can_make_venv "$python"; then # Debian and Ubuntu pack this part of Python separately
    package=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
    "$here/system_packages.sh" "$package"
    if ! can_make_venv "$python"; then
        echo "venv: $python cannot make environments; install the system package $package" >&2
        exit 1
    fi
fi

pip_install() { .venv/bin/python -m pip install -qq --constraint constraints.txt ${PIP_ARGS:-} "$@"; }

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then # missing, half made, or its folder was moved
    "$python" -m venv --clear .venv
fi
echo "venv: installing into .venv with $(.venv/bin/python -V); torch is large, the first time takes minutes"
if [ -n "${TORCH:-}" ]; then
    pip_install "$TORCH"
else
    version=$(sed -n 's/^torch==//p' constraints.txt)
    if ! pip_install "torch==$version+cpu" 2>/dev/null; then
        echo "venv: pip finds no CPU build of torch $version here and takes the default one (choose with TORCH, PIP_ARGS)"
        pip_install "torch==$version"
    fi
fi
pip_install --editable '.[dev,torch,mpi,gpu,local]'
