"""Runs a user's script in this process as ``python`` would, so that clew can watch it from inside."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import pkgutil
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import CodeType, TracebackType

_OURS: Final = str(Path(__file__).resolve().parents[1]) + os.sep
_INTERRUPTED: Final = 130


class Program(NamedTuple):
    """A script or module that was found but not yet read: ``load`` compiles it, as ``main`` says it is."""

    load: Callable[[], CodeType]
    argv0: str
    path_entry: str
    main: dict[str, Any]


class Outcome(NamedTuple):
    """How a script ended: its exit code, and whether Ctrl-C or an exception ended it."""

    exit_code: int
    was_interrupted: bool = False
    error: BaseException | None = None


def load_script(path: str) -> Program:
    """Find a script, or the ``__main__`` of a folder or an archive."""
    # Python makes the name absolute for __file__ and tracebacks, and leaves it alone in argv.
    file = path if Path(path).is_absolute() else f"{Path.cwd()}/{path}"
    importer = pkgutil.get_importer(file) if Path(file).exists() else None
    if importer is not None:
        return _load_folder(path, file, importer)
    if not Path(file).is_file():
        raise UsageError(
            f"no script '{path}'", where=str(Path.cwd()), next_step="check the path, or use -m for a module"
        )
    loader = SourceFileLoader("__main__", file)
    main = {"__file__": file, "__loader__": loader, "__spec__": None, "__package__": None}
    return Program(lambda: _compile(file), path, str(Path(file).resolve().parent), main)


def _load_folder(path: str, file: str, importer: Any) -> Program:
    spec = importer.find_spec("__main__")
    if spec is None:
        raise UsageError(
            f"can't find '__main__' module in '{path}'", next_step="name the script inside the folder"
        )
    return Program(_loads(spec), path, file, _describe(spec))


def load_module(name: str) -> Program:
    """Find a module as ``python -m`` would."""
    # python -m puts the working directory first, also for the search of the module itself.
    sys.path[0] = str(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot import '{name}': {error}", next_step="check the module's name") from error
    if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise UsageError(f"no module named '{name}'", next_step="check the name, or give the script's path")
    return Program(_loads(spec), spec.origin, str(Path.cwd()), _describe(spec))


def _loads(spec: ModuleSpec) -> Callable[[], CodeType]:
    def load() -> CodeType:
        loader: Any = spec.loader
        code = loader.get_code(spec.name)
        if code is None:
            raise ImportError(f"no Python code in {spec.origin}", name=spec.name)
        return cast("CodeType", code)

    return load


def _describe(spec: ModuleSpec) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__spec__": spec,
        "__package__": spec.parent,
    }


def execute(program: Program, argv: list[str]) -> Outcome:
    """Run a program as ``__main__`` to its end; its own traceback is printed as Python would print it."""
    sys.argv = [program.argv0, *argv]
    sys.path[0] = program.path_entry
    main = types.ModuleType("__main__")
    main.__dict__.update(program.main, __cached__=None, __annotations__={}, __builtins__=builtins)
    # The user's module stays __main__ until the process ends: pickles and exit handlers look there.
    sys.modules["__main__"] = main
    try:
        exec(program.load(), main.__dict__)  # noqa: S102 - running the user's own script is the point
    except SystemExit as stop:
        return Outcome(_exit_code(stop), error=None)
    except BaseException as error:  # noqa: BLE001 - whatever the script raised is the script's outcome
        show_error(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        return Outcome(_INTERRUPTED if interrupted else 1, was_interrupted=interrupted, error=error)
    return Outcome(0)


def show_error(error: BaseException) -> None:
    """Print an uncaught exception through the script's own hook, without the frames of clew."""
    _strip(error, seen=set())
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as broken:  # noqa: BLE001 - a broken hook of the script's: Python says so likewise
        broken.__context__ = None
        _strip(broken, seen=set())
        _write_error("Error in sys.excepthook:\n", broken)
        _write_error("\nOriginal exception was:\n", error)


def _write_error(title: str, error: BaseException) -> None:
    sys.stderr.write(title)
    sys.__excepthook__(type(error), error, error.__traceback__)


def _strip(error: BaseException | None, *, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _without_ours(error.__traceback__)
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        _strip(other, seen=seen)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_OURS):
            kept.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for trace in reversed(kept):
        rest = types.TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return rest


def _exit_code(stop: SystemExit) -> int:
    code: Any = stop.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _compile(file: str) -> CodeType:
    with io.open_code(file) as source:
        return compile(source.read(), file, "exec", dont_inherit=True)
