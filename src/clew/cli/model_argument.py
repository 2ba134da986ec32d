"""A model on the command line: ``script.py:make_model`` and its ``--input``, as several commands take them.

An input is written ``[NAME=][DTYPE:]SIZES[:LOW..HIGH]``: ``4,3,128,128`` is a float32 tensor of normal random
numbers, ``int64:2,16:0..100`` one of whole numbers from 0 up to 99, ``mask=bool:2,16`` a keyword argument.
``none``, ``true``, ``false``, ``value:0.5``, ``text:hello`` and ``@batch.npy`` are inputs too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.errors import UsageError, suggest
from clew.model.input_spec import InputSpec

if TYPE_CHECKING:
    from argparse import Namespace
    from types import ModuleType

    from clew.cli.parser import Parser

DTYPES: Final = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128",
)  # fmt: skip

_WORDS: Final = {"none": None, "true": True, "false": False}
_EXAMPLE: Final = "write it like 4,3,128,128 or int64:2,16:0..100 or mask=bool:2,16"


_loaded: dict[str, str] = {}
"""The module's name of each script that was imported."""


def add_model(parser: Parser) -> None:
    """Add the model, its inputs and its mode to a command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="script.py:make_model, script.py:make_model,make_batch, package.module:Class, "
        "or an exported program (.pt2)",
    )
    parser.add_argument(
        "--input",
        metavar="SPEC",
        action="append",
        default=[],
        help="an input, such as 4,3,128,128 or int64:2,16:0..100 or mask=bool:2,16; once for each",
    )
    parser.add_argument("--eval", action="store_true", help="put the model into evaluation mode first")


def load_model(args: Namespace) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the model of a command line with its positional and keyword inputs.

    An exported program is loaded only with ``--trust``, an option that the command adds itself.
    A factory may return ``(model, input, …)``; inputs of the command line then come after its own.
    """
    from clew.api.look import load_exported, make_input

    if args.model.endswith(".pt2"):
        if not args.trust:
            raise UsageError(
                "an exported program can run code when it is loaded",
                where=args.model,
                next_step="if you know where it comes from: --trust",
            )
        return load_exported(args.model), (), {}
    model, inputs, named = _make_with_inputs(args.model)
    if args.eval and hasattr(model, "eval"):
        model.eval()
    specs = [parse_input(text) for text in args.input]
    positional = [make_input(spec) for spec in specs if not spec.name]
    named |= {spec.name: make_input(spec) for spec in specs if spec.name}
    return model, (*inputs, *positional), named


def _make_with_inputs(text: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return a model with the inputs that its factory, or the factory of a batch behind the comma, gives."""
    if "," in text:
        model, batch = load_pair(text)
        if isinstance(batch, dict):
            return model, [], dict(batch)
        return model, list(batch) if isinstance(batch, (tuple, list)) else [batch], {}
    made = _call_factory(_find_factory(text), text)
    model, *inputs = made if isinstance(made, tuple) else (made,)
    return model, inputs, {}


def load_pair(text: str) -> tuple[Any, Any]:
    """Return the model and the batch of ``script.py:make_model,make_batch``."""
    head, comma, batch = text.partition(",")
    home, colon, _ = head.rpartition(":")
    if not comma or not colon:
        raise UsageError(
            f"'{text}' names no model and batch", next_step="write it like train.py:make_model,make_batch"
        )
    model = _find_factory(head)
    module = sys.modules.get(_loaded.get(home, home))
    return _call_factory(model, head), _call_factory(_find_in(module, batch, home), batch)


def parse_input(text: str) -> InputSpec:
    """Return what an ``--input`` asks for."""
    match = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(.*)", text, re.DOTALL)
    name, rest = (match.group(1) or "", match.group(2)) if match else ("", text)
    if rest.startswith("@"):
        return InputSpec(name=name, kind="file", value=rest[1:])
    if rest in _WORDS:
        return InputSpec(name=name, kind="value", value=_WORDS[rest])
    if rest.startswith("text:"):
        return InputSpec(name=name, kind="value", value=rest[5:])
    if rest.startswith("value:"):
        return InputSpec(name=name, kind="value", value=_number(rest[6:], text))
    return _parse_tensor(name, rest, text)


def _parse_tensor(name: str, rest: str, text: str) -> InputSpec:
    parts = rest.split(":")
    dtype = "float32"
    if re.match(r"[A-Za-z]", parts[0]):
        dtype = parts.pop(0)
        if dtype not in DTYPES:
            raise UsageError(
                f"'{dtype}' is no dtype", where=f"--input {text}", next_step=suggest(dtype, DTYPES)
            )
    sizes = parts.pop(0) if parts else ""
    limits = parts.pop(0) if parts else ""
    if parts or not re.fullmatch(r"(\d+(,\d+)*)?", sizes) or not rest or dtype == rest:
        raise UsageError(f"'{text}' is no input", next_step=_EXAMPLE)
    low, high = _limits(limits, text) if limits else (None, None)
    shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    return InputSpec(name=name, kind="tensor", dtype=dtype, shape=shape, low=low, high=high)


def _limits(limits: str, text: str) -> tuple[float, float]:
    low, dots, high = limits.partition("..")
    if not dots:
        raise UsageError(f"'{limits}' is no range", where=f"--input {text}", next_step="write it like 0..100")
    ends = _number(low, text), _number(high, text)
    if ends[0] >= ends[1]:
        raise UsageError(
            f"the range '{limits}' is empty", where=f"--input {text}", next_step="put the lower end first"
        )
    return ends


def _number(word: str, text: str) -> float:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        raise UsageError(f"'{word}' is no number", where=f"--input {text}", next_step=_EXAMPLE) from None


def _find_factory(text: str) -> Any:
    home, colon, name = text.rpartition(":")
    if not colon or not home or not name:
        raise UsageError(
            f"'{text}' names no model",
            next_step="write it like train.py:make_model or package.models:Net",
        )
    module = _import_file(Path(home)) if home.endswith(".py") else _import_name(home)
    return _find_in(module, name, home)


def _find_in(module: Any, name: str, home: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = suggest(part, (each for each in vars(found) if not each.startswith("_")))
            raise UsageError(
                f"no '{part}' in {home}", next_step=near or "name a function, a class or a model"
            )
        found = getattr(found, part)
    return found


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(
            f"no script '{path}'", next_step="give the path of a Python file, then a colon and a name"
        )
    # The script's neighbours are importable, as when it is run itself; its main part does not run.
    sys.path.insert(0, str(path.resolve().parent))
    # A script may be called like a module that is loaded already, which must keep its name.
    name = path.stem if path.stem not in sys.modules else f"clew_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"'{path}' is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _loaded[str(path)] = name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _import_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _import_failed(name, error) from error


def _import_failed(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"importing {name} raised {type(error).__name__}: {error}",
        next_step="a script is imported, not run: keep what trains under if __name__ == '__main__'",
    )


def _call_factory(found: Any, text: str) -> Any:
    """Return the model: a class or function is called, anything else is taken for a model itself."""
    is_factory = inspect.isclass(found) or inspect.isfunction(found) or inspect.ismethod(found)
    if not is_factory:
        return found
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(
            f"{text} cannot be called without arguments: {error}",
            next_step="write a function without arguments that returns the model",
        ) from None
    try:
        return found()
    except Exception as error:
        raise UsageError(
            f"{text} raised {type(error).__name__}: {error}", next_step="call it in Python to see where"
        ) from error
