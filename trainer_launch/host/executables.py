"""How the kernel executes a file, or why not: its first line, interpreter or format. Nothing is run."""

from __future__ import annotations

import os
import re
import shutil

from trainer_launch.host.files import LiveFiles

_START_BYTES = 4096
_SHOWN_BYTES = 120
_ELF = b"\x7fELF"
_FIRST_LINE = re.compile(rb"#![ \t]*([^ \t\n]+)[ \t]*([^ \t\n=]*)[^\n]*")  # an interpreter, and a word for it
_EXEC_LINE = re.compile(rb'exec\' "?([^"\n]+?)"? "\$0"')  # where a path is too long for a first line
_LOADER = re.compile(rb"/[\w/.-]*/ld[\w.-]*\.so[\w.]*")
# Of ELF's numbers those of machines that train, and what uname calls them.
_MACHINES = {3: "i686", 21: "ppc64le", 22: "s390x", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


def obstacle(path: str, search: str | None) -> str | None:
    """The reason why this file cannot be executed, and what to do; None: there is none that can be seen.

    `search` is the PATH in which `#!/usr/bin/env NAME` looks. Which other formats there are only the kernel knows.
    """
    first, program, name = _interpreter(_start_of(path))
    line = repr(first[:_SHOWN_BYTES].decode(errors="replace"))
    if "\r" in program + name:
        return f"its lines end as on Windows (CRLF), also the first: {line}; write: sed -i 's/\\r$//' {path}"
    if first and not os.path.exists(program):
        return f"its interpreter does not exist: {line}; install it in the image, or correct the line"
    if name and shutil.which(name, path=search) is None:
        return f"its interpreter {name!r} was not found in PATH ({search or 'not set'}): {line}"
    return None


def interpreter(path: str, search: str | None) -> str | None:
    """The program that a script's first line names, looked for in the PATH `search`; None: it is no script."""
    start = _start_of(path)
    first, program, name = _interpreter(start)
    if first and (long := _EXEC_LINE.search(start)) is not None:
        return os.fsdecode(long[1])
    return shutil.which(name, path=search) if name else program or None


def _interpreter(start: bytes) -> tuple[bytes, str, str]:
    """A script's first line, the program in it, and the NAME that `env` has to look for; empty where it is none."""
    first = _FIRST_LINE.match(start)
    program, word = map(os.fsdecode, first.groups()) if first else ("", "")
    is_name = os.path.basename(program) == "env" and not word.startswith("-")
    return first[0] if first else b"", program, word if is_name else ""


def of_format(path: str) -> str:
    """Why a file is of no format that this machine executes, once the kernel has said so, and what to do."""
    start, here = _start_of(path), os.uname().machine
    if start.startswith(_ELF):
        number = int.from_bytes(start[18:20], "big" if start[5:6] == b"\2" else "little")
        machine = _MACHINES.get(number, f"another processor (ELF machine {number})")
        return f"it is a program for {machine}, and this machine is {here}; take the one for {here}"
    if not start:
        return "it is empty"
    return f"no first line names its interpreter; add one, such as #!/bin/sh, or write: sh {path}"


def loader_of(path: str) -> str:
    """The dynamic loader that a binary names; "": none."""
    start = _start_of(path)
    match = _LOADER.search(start) if start.startswith(_ELF) else None
    return match[0].decode() if match else ""


def _start_of(path: str) -> bytes:
    return LiveFiles(_START_BYTES).read(path) or b""
