"""Native stacks of a process that hangs, from a debugger that is installed: py-spy or gdb."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_NATIVE_SECONDS: Final = 30
_LIBRARIES: Final = r"libc\.so|libpython|libc10|libtorch_cpu|libgomp|libcuda|libnccl"
_SET_PTRACER: Final = 0x59616D61
_ANYBODY: Final = ctypes.c_ulong(-1)
_LEAST_BYTES: Final = 16
"""What a debugger says that could not look is shorter than any stack."""


def write_native_stacks(process: int, descriptor: int) -> None:
    """Have py-spy or gdb write the native stacks of a process to a file, or say there why there are none.

    They stop the process while they look, this thread included: what they say goes past it, and so does the limit.
    """
    limit = shutil.which("timeout")
    tools = {
        "py-spy": ["dump", "--native", "--pid", str(process)],
        # Reading the symbols of every library of torch would take minutes.
        "gdb": ["-p", str(process), "-batch", "-nx", "-iex", "set auto-solib-add off",
                "-iex", "set debuginfod enabled off", "-ex", f"sharedlibrary {_LIBRARIES}",
                "-ex", "thread apply all bt 40"],
    }  # fmt: skip
    tool = next((tool for tool in tools if shutil.which(tool) is not None), None)
    if tool is None or limit is None:
        os.write(descriptor, b"\nnative stacks: none, for neither py-spy nor gdb is installed\n")
        return
    os.write(descriptor, f"\nnative stacks, from {tool}:\n".encode())
    words = [limit, "-s", "KILL", str(_NATIVE_SECONDS), tool, *tools[tool]]
    before = os.fstat(descriptor).st_size
    with contextlib.suppress(OSError), _letting_look():
        subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=subprocess.DEVNULL, check=False
        )
    if os.fstat(descriptor).st_size - before < _LEAST_BYTES:
        os.write(descriptor, f"none: {tool} may not look at this process here\n".encode())


@contextlib.contextmanager
def _letting_look() -> Iterator[None]:
    """Let a process that this one starts look at it, for as long as it takes: some systems allow it to parents only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        yield
        return
    prctl(_SET_PTRACER, _ANYBODY, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_PTRACER, 0, 0, 0, 0)
