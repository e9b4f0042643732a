"""The one guard of a forked worker: whether its first import of torch or numpy is as in a new interpreter.

The fork server has imported both, and their libraries read variables while they are loaded. Where the program has
changed such a variable before its first import, the worker replaces itself by a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from multiprocessing import util
from types import ModuleType
from typing import Any

# What importing each of them brings.
BRINGS = {"numpy": ("numpy",), "torch": ("torch", "numpy")}
# Variables that are read during the import, by prefix, because each release adds some. A getenv() that logs shows
# what the libraries read; tests/pytorch/test_first_import.py shows what Python reads.
_READ_BY = {
    "OpenMP: libgomp and libomp": ("ACC_DEVICE_", "GOMP_", "KMP_", "OMP_"),
    "MKL, oneDNN, FBGEMM, ITT": ("DNNL_", "FBGEMM_", "INTEL_LIBITTNOTIFY", "MKLDNN_", "MKL_", "ONEDNN_"),
    "OpenBLAS, BLIS, Accelerate, Fortran": ("BLIS_", "GFORTRAN_", "GOTO_", "GOTOBLAS_", "OPENBLAS_", "VECLIB_"),
    "numpy": ("NPY_", "NUMPY_"),
    "static initialisers of libtorch": ("ATEN_", "KINETO_", "LTC_", "PYTORCH_", "TORCH_"),
    "modules of torch": (
        *("COMPILE_STROBELIGHT_", "FX_", "LOGLEVEL", "TORCHDYNAMO_", "TORCHEXPORT_", "TORCHINDUCTOR_"),
    ),
    "CUDA's libraries and OpenSSL": ("CUBLASLT_LOG", "CUBLAS_LOG", "CUDNN_LOG", "OPENSSL_"),
}
_AT_IMPORT = tuple(prefix for prefixes in _READ_BY.values() for prefix in prefixes)
# Of those, what is read each time that it is needed, or when a process group or a device is initialised.
_LATER = (
    *("TORCH_ELASTIC_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_NCCL_", "TORCH_UCC_", "TORCH_WATCHDOG_", "TORCH_XCCL_"),
    *("TORCH_CUDA_ARCH_LIST", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_EXTENSIONS_DIR", "TORCH_HOME"),
    *("PYTORCH_KERNEL_CACHE_PATH", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"),
)


def read_at_import(name: str) -> bool:
    """Whether torch, numpy or a library of theirs reads this variable while it is loaded."""
    return name.startswith(_AT_IMPORT) and not name.startswith(_LATER)


def changed(loaded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that an import would read, and that differ from when the fork server imported."""
    names = sorted(name for name in loaded.keys() | now.keys() if loaded.get(name) != now.get(name))
    return tuple(name for name in names if read_at_import(name))


class FirstImport:
    """A finder that gives torch and numpy back, as the modules that the fork server has imported.

    `loaded` is the environment in which they were imported. What the imports themselves set is set again with them.
    """

    def __init__(self, loaded: Mapping[str, str], now: Mapping[str, str]) -> None:
        """In the fork server, when everything has been imported; `now` is its environment after that."""
        self._loaded = dict(loaded)
        self._set_by_imports = {name: value for name, value in now.items() if loaded.get(name) != value}
        self._modules = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] in BRINGS}
        self._specs = {name: self._modules[name].__spec__ for name in BRINGS if name in self._modules}
        self._given: set[str] = set()
        self._has_exit_handlers = False  # those that these imports, or multiprocessing's, register
        self._replace: Callable[[str], None] = print  # set when the program begins
        self._pid = 0

    @property
    def modules(self) -> Mapping[str, ModuleType]:
        """torch, numpy and all of their submodules, by name."""
        return self._modules

    def begin(self, replace: Callable[[str], None]) -> None:
        """In a worker, before its program: take them away; `replace` starts a new interpreter for a reason."""
        self._replace, self._pid = replace, os.getpid()
        for name in self._modules:
            sys.modules.pop(name, None)
        # Finalizers run where the program makes its first one, not where torch's import has made some.
        finalize: Any = weakref.finalize
        atexit.unregister(finalize._exitfunc)
        finalize._registered_with_atexit = False
        finders: list[Any] = sys.meta_path
        finders.insert(0, self)

    def find_spec(self, name: str, _path: object = None, target: object = None) -> ModuleSpec | None:
        """The specification of torch or numpy until they are imported; None for everything else."""
        if name.startswith("multiprocessing."):  # what the server has not loaded registers one, by what it imports
            self._register_exit_handlers()
        genuine = self._specs.get(name)
        is_removed = name in self._given and name not in sys.modules  # by the program, which wants another one
        if genuine is None or target is not None or is_removed:
            return None
        spec = copy.copy(genuine)
        spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, if nothing has changed that its import would read; else this does not return."""
        names = changed(self._loaded, os.environ) if self._pid == os.getpid() else ()
        if names and spec.name not in self._given:
            self._replace(f"the program changes {', '.join(names)} before it imports {spec.name}")
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed: the module and all that its import brings are shown again."""
        name = module.__name__
        vars(module)["__spec__"] = self._specs[name]  # not the copy with this loader
        for other in self._modules:
            if other.partition(".")[0] in BRINGS[name]:
                sys.modules.setdefault(other, self._modules[other])
        if name == "torch":  # which brings all of it: nothing is left to do
            with contextlib.suppress(ValueError):
                finders: list[Any] = sys.meta_path
                finders.remove(self)
            self._register_exit_handlers()
            finalize: Any = weakref.finalize
            if not finalize._registered_with_atexit:
                atexit.register(finalize._exitfunc)
                finalize._registered_with_atexit = True
            for variable, value in self._set_by_imports.items():
                os.environ.setdefault(variable, value)
        self._given.update(BRINGS[name])

    def _register_exit_handlers(self) -> None:
        """Have multiprocessing join its children at the end, before earlier handlers run."""
        if not self._has_exit_handlers:
            self._has_exit_handlers = True
            handler = getattr(util, "_exit_function")  # noqa: B009
            atexit.unregister(handler)
            atexit.register(handler)
