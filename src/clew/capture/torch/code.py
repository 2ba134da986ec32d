"""What the forward of a module calls, in words: so that two runs can tell that their code was not the same.

The code is read, never run. Names of attributes, functions and keywords, constants, operators and calls stand in the
order of execution; names of local variables are left out, since they change nothing.
"""

from __future__ import annotations

import dis
import hashlib
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_MOST_CHARACTERS: Final = 1200
_DEEPEST: Final = 3
_PLAIN: Final = (bool, int, float, complex, str)
_FOREIGN: Final = ("torch", "numpy", "math", "builtins", "clew")
_NAMED: Final = (
    "LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_SUPER_ATTR", "STORE_ATTR", "IMPORT_NAME",
)  # fmt: skip

_told: dict[CodeType, str] = {}


def describe_code(module: torch.nn.Module) -> str:
    """Return what the module's own forward does, as words; nothing for modules that come with torch."""
    function = module.__dict__.get("forward") or getattr(type(module), "forward", None)
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType) or _is_foreign(function):
        return ""
    told = _told.get(function.__code__)
    if told is None or function.__closure__:
        words = " ".join(_read_function(function, type(module), set(), 0)).replace(";", ",")
        told = _told[function.__code__] = _shorten(words)
    return told


def _is_foreign(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] in _FOREIGN


def _shorten(words: str) -> str:
    if len(words) <= _MOST_CHARACTERS:
        return words
    rest = hashlib.blake2s(words.encode("utf-8", "replace"), digest_size=6).hexdigest()
    return f"{words[:_MOST_CHARACTERS].rpartition(' ')[0]} #{rest}"


def _read_function(function: FunctionType, owner: type, seen: set[CodeType], depth: int) -> Iterator[str]:
    """Yield the words of a function and of the functions of the same program that it calls."""
    code = function.__code__
    if code in seen or depth > _DEEPEST:
        return
    seen.add(code)
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *_cells(function)]
    yield from (_tell(value) for value in given if isinstance(value, _PLAIN))
    called: list[FunctionType] = []
    for word in _read_code(code):
        found = function.__globals__.get(word)
        if isinstance(found, _PLAIN) and not word.startswith("__"):
            yield f"{word}={_tell(found)}"
            continue
        yield word
        method = found if isinstance(found, FunctionType) else _find_method(owner, word)
        if isinstance(method, FunctionType) and not _is_foreign(method):
            called.append(method)
    for each in called:
        yield from _read_function(each, owner, seen, depth + 1)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # a name that was never bound


def _find_method(owner: type, name: str) -> object:
    return next((vars(kind)[name] for kind in owner.__mro__ if name in vars(kind)), None)


def _read_code(code: CodeType) -> Iterator[str]:
    # The first constant of a function with a text at its head is that text.
    documented = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name == "KW_NAMES" and instruction.arg is not None:
            value = code.co_consts[instruction.arg]
        if name in _NAMED:
            yield str(value)
        elif isinstance(value, CodeType):
            yield from _read_code(value)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST", "KW_NAMES"):
            if value is not None and (value is not documented or name != "LOAD_CONST"):
                yield _tell(value)
        elif name in ("BINARY_OP", "COMPARE_OP") or name.startswith(("BINARY_", "INPLACE_", "UNARY_")):
            yield instruction.argrepr or name.lower()
        elif name.startswith("CALL"):
            yield "()"


def _tell(value: object) -> str:
    """Return a constant as one word that is the same in every process."""
    if isinstance(value, tuple):
        return f"({','.join(_tell(part) for part in value)})"
    return repr(value).replace(" ", "_") if isinstance(value, _PLAIN) else type(value).__name__
