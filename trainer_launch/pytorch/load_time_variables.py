"""Environment variables that torch and its libraries read when they are loaded, and who sets them too late.

A forked worker comes from a process that has loaded torch already. A program that sets such a variable before it
imports torch therefore has to be started with exec.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

# Read by static initialisers of libtorch, libgomp, MKL, OpenBLAS, oneDNN and numpy, or by modules that
# `import torch` executes. Found with a getenv() that logs; by prefix, because each release adds some.
_AT_LOAD = (
    *("ACC_DEVICE_", "ATEN_", "BLIS_", "CUBLASLT_LOG", "CUBLAS_LOG", "CUDNN_LOG", "DNNL_", "FBGEMM_", "GFORTRAN_"),
    *("GOMP_", "GOTO_", "KINETO_", "KMP_", "LTC_", "MKL_", "MKLDNN_", "NPY_", "NUMPY_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHEXPORT_", "TORCHINDUCTOR_", "VECLIB_"),
    *("COMPILE_STROBELIGHT_", "FX_", "INTEL_LIBITTNOTIFY", "LOGLEVEL", "OPENSSL_"),
)
# Of those, what is read each time that it is needed, or when a process group or a device is initialised.
_LATER = (
    *("TORCH_ELASTIC_", "TORCH_FR_", "TORCH_GLOO_", "TORCH_NCCL_", "TORCH_UCC_", "TORCH_XCCL_"),
    *(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "TORCH_CUDA_ARCH_LIST",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
    ),
    *("PYTORCH_KERNEL_CACHE_PATH", "PYTORCH_NVML_BASED_CUDA_CHECK"),
)
# Read by the dynamic loader, the C library and the interpreter before any Python runs.
_AT_EXEC = ("GLIBC_TUNABLES", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON", "TZ")
# Python 3.14 imports a module at the first ast.unparse(): now, as later imports of ours would show in workers.
_IS_MAIN = ast.unparse(ast.parse("__name__ == '__main__'"))
_ENVIRON = ("os.environ", "environ", "os.environb", "environb")
_PUTENV = ("os.putenv", "putenv")
_UPDATES = tuple(f"{name}.update" for name in _ENVIRON)
_FILES = 64  # that the scan reads
_Write = tuple[
    str, str, str | None
]  # a variable, "set", "default" or "remove", and its value where that is a constant
_BYTES = 1 << 20  # of each


def read_at_load(name: str) -> bool:
    """Whether a library reads this variable when it is loaded."""
    return name.startswith(_AT_LOAD) and not name.startswith(_LATER)


def changed(loaded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that torch would read when it is loaded, and that differ from when it was."""
    return tuple(name for name in _differing(loaded, now) if read_at_load(name))


def changed_before_exec(loaded: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Likewise, with those that are read when an interpreter starts."""
    return tuple(name for name in _differing(loaded, now) if read_at_load(name) or name.startswith(_AT_EXEC))


def _differing(loaded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in loaded.keys() | now.keys() if loaded.get(name) != now.get(name))


# -- what the program's source says -----------------------------------------------------------


def set_by(words: Sequence[str], cwd: str, environment: Mapping[str, str], path: Sequence[str] = ()) -> str | None:
    """Where a program sets such a variable before it imports torch, for a log line; `words` follow `python -u`.

    Only statements that run when a module is executed count: a worker finds out itself about names that are
    computed and about functions that are called. `path` is where a module is looked for, besides `cwd`.
    """
    folder, files = _program(words, cwd, path)
    places = (folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    installed = words[1].partition(".")[0] if words[0] == "-m" else None  # of which the program is a part
    seen: set[str] = set()

    def walk(file: str, package: str, *, is_main: bool) -> Iterator[str | None]:
        """Each finding; None where torch is imported, which ends the search."""
        tree = _parse(file) if file not in seen and len(seen) < _FILES else None
        seen.add(file)
        for node in _executed(tree.body, is_main=is_main) if tree else ():
            for name, action, value in _written(node):
                if read_at_load(name) and _changes(action, environment.get(name), value):
                    yield f"{file.removeprefix(f'{folder}/')}:{node.lineno} sets {name} before it imports torch"
            for module in _imported(node, package):
                top = module.partition(".")[0]
                if top == "torch":
                    yield None
                for local, its_package in _local(module, (*places, *path) if top == installed else places):
                    yield from walk(local, its_package, is_main=False)

    for file, package in files:
        for found in walk(file, package, is_main=(file, package) == files[-1]):
            return found
    return None


def _program(words: Sequence[str], cwd: str, path: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The first directory that its modules come from, and the files that are executed, each with its package."""
    if words[0] != "-m":
        script = os.path.realpath(os.path.join(cwd, words[0]))
        main = os.path.join(script, "__main__.py")
        return (script, [(main, "")]) if os.path.isfile(main) else (os.path.dirname(script), [(script, "")])
    places = (cwd, *path)
    files = list(_local(words[1], places))
    if files and files[-1][0].endswith("/__init__.py"):
        files += _local(f"{words[1]}.__main__", places)[-1:]
    return cwd, files


def _changes(action: str, present: str | None, value: str | None) -> bool:
    """Whether a statement gives a variable another value than the one that torch was loaded with."""
    if action == "set":
        return value is None or value != present
    return (present is None) == (action == "default")


def _parse(path: str) -> ast.Module | None:
    """A file's statements; None where there are none to read, which running it will tell."""
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read(_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _executed(body: Iterable[ast.AST], *, is_main: bool) -> Iterator[ast.stmt]:
    """The simple statements that executing these may run, in the order of the source."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (not is_main and _only_in_main(node)):
            continue
        below = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.excepthandler)]
        if below:
            yield from _executed(below, is_main=is_main)
        elif isinstance(node, ast.stmt):
            yield node


def _only_in_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == _IS_MAIN


def _written(node: ast.stmt) -> Iterator[_Write]:
    """What a statement does to variables whose names are constants."""
    for key, value, action in _changed_items(node):
        name = key.value if isinstance(key, ast.Constant) else None
        name = os.fsdecode(name) if isinstance(name, bytes) else name
        if isinstance(name, str):
            constant = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
            yield name, "remove" if value is None else action, constant


def _changed_items(node: ast.stmt) -> Iterator[tuple[ast.expr | None, ast.expr | None, str]]:
    """Name, value and action: of `environ[…]`, `|=`, `del`, and of the calls that change the environment."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) in _ENVIRON:
                yield target.slice, node.value if isinstance(node, ast.Assign) else None, "set"
    elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) in _ENVIRON:
        yield from _items(node.value)
    for call in ast.walk(node):
        function = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        args = call.args if isinstance(call, ast.Call) else []
        owner, _, method = function.rpartition(".")
        if function in _UPDATES:
            yield from (item for one in (*args, call) for item in _items(one))
        elif (function in _PUTENV or (owner in _ENVIRON and method == "setdefault")) and args[1:]:
            yield args[0], args[1], "set" if function in _PUTENV else "default"
        elif owner in _ENVIRON and method == "pop" and args:
            yield args[0], None, "set"


def _items(node: ast.AST) -> list[tuple[ast.expr | None, ast.expr, str]]:
    """The items of a dict that is written out: `{…}`, `dict(…)`, or the names that update() gets."""
    if isinstance(node, ast.Dict):
        return [(key, value, "set") for key, value in zip(node.keys, node.values, strict=True)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("dict", *_UPDATES):
        return [(ast.Constant(keyword.arg), keyword.value, "set") for keyword in node.keywords]
    return []


def _imported(node: ast.stmt, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above: Sequence[str] = (
            package.split(".")[: max(0, package.count(".") + 2 - node.level)] if node.level else []
        )
        module = ".".join([*(word for word in above if word), *([node.module] if node.module else [])])
        yield module
        yield from (f"{module}.{alias.name}".strip(".") for alias in node.names)


def _local(module: str, places: Iterable[str]) -> list[tuple[str, str]]:
    """The files that importing a module executes, each with its package: parents first. Nothing is imported."""
    words = module.split(".")
    for folder in places:
        found = []
        for length in range(1, len(words) + 1):
            name = ".".join(words[:length])
            place = os.path.join(folder, *words[:length])
            if os.path.isfile(f"{place}/__init__.py"):
                found.append((f"{place}/__init__.py", name))
            elif os.path.isfile(f"{place}.py"):
                found.append((f"{place}.py", name.rpartition(".")[0]))
        if found:
            return found
    return []
