#!/usr/bin/env bash
# Run the tests of tests/gpu on this machine's NVIDIA GPUs, without network; or pack what they need besides torch.
#   gpu.sh pack [VERSION]     with network: download wheels for Python VERSION (default: 3.12) into .gpu-wheels
#   gpu.sh test [ARGUMENT...] run the tests, with further arguments for pytest; prints where the result is
#   PYTHON          the Python to use (default: .venv's or python3, the first one whose torch sees a GPU)
#   GPU_REHEARSAL   cpu: run the same tests on the CPU with gloo, which proves nothing of GPUs
#   GPU_RESULT      the file for the result, as JUnit writes it (default: build/gpu.xml)
#   PIP_ARGS        further options for pip
# Wheels in .gpu-wheels are used if a module is missing. They are unpacked into a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD wheels=.gpu-wheels
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
PACKED=(hypothesis msgspec nvidia-ml-py psutil pydantic-settings pytest pytest-timeout pyyaml)
MODULES="hypothesis msgspec pynvml psutil pydantic_settings pytest pytest_timeout yaml"

pack() { # VERSION
    local arguments=(--only-binary=:all: --implementation cp --python-version "$1") minor
    for minor in 17 24 27 28 31 34 35; do
        arguments+=(--platform "manylinux_2_${minor}_x86_64")
    done
    rm -rf "$wheels"
    # shellcheck disable=SC2086
    "${PYTHON:-python3}" -m pip download -qq --dest "$wheels" --constraint constraints.txt ${PIP_ARGS:-} \
        "${arguments[@]}" --platform manylinux2014_x86_64 "${PACKED[@]}"
    echo "gpu: packed $(find "$wheels" -name '*.whl' | wc -l) wheels for Python $1 in $wheels, $(du -sh "$wheels" | cut -f1)"
}

state() { # PYTHON: "" if its torch can be used for this, else why not
    "$1" - <<'PYTHON' 2>/dev/null || echo "cannot be run"
import os
try:
    import torch
except ImportError:
    print("has no torch")
else:
    if os.environ.get("GPU_REHEARSAL") != "cpu" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"has torch {torch.__version__}, {built}, which sees no NVIDIA GPU")
PYTHON
}

find_python() { # sets `python`
    local candidate why said=""
    for candidate in ${PYTHON:-.venv/bin/python python3}; do
        command -v "$candidate" >/dev/null || continue
        why=$(state "$candidate")
        [ -n "$why" ] || { python=$candidate; return; }
        said+="${said:+; }$candidate $why"
    done
    echo "gpu: nothing was tested: ${said:-there is no ${PYTHON:-python3}}" >&2
    exit 3
}

missing() { # names of modules that this Python does not have
    "$python" - $MODULES <<'PYTHON'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
PYTHON
}

test_gpus() { # ARGUMENT...
    local absent python result=${GPU_RESULT:-build/gpu.xml} status=0
    find_python
    export PYTHONPATH=$root
    absent=$(missing)
    if [ -n "$absent" ] && compgen -G "$wheels/*.whl" >/dev/null; then
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
        export PYTHONPATH=$root:$site
        absent=$(missing)
    fi
    if [ -n "$absent" ]; then
        echo "gpu: nothing was tested: $python has no $absent; run 'make gpu-wheels' with network and bring $wheels here" >&2
        exit 3
    fi
    mkdir -p "$(dirname "$result")"
    rm -f "$result"
    # What else is installed for pytest there is not ours.
    PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
        "$python" -m pytest -p pytest_timeout -v -o junit_family=xunit1 --junitxml "$result" -m gpu tests/gpu "$@" || status=$?
    [ ! -f "$result" ] || echo "gpu: the result is in $result"
    return $status
}

case ${1:-} in
pack) pack "${2:-3.12}" ;;
test) test_gpus "${@:2}" ;;
*) echo "gpu: expected pack or test" >&2; exit 2 ;;
esac
