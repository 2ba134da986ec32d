"""What there is to know about an exception that ended a training: where in the model, with which values."""

from __future__ import annotations

import builtins
import linecache
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.assemble import KIND_SHIFT, SITE_SHIFT
from clew.capture.torch.leaves import walk
from clew.errors import ClewError
from clew.model.schema import KIND_INDEX
from clew.replay.exception_hint import explain_message, read_message
from clew.replay.exception_memory import is_out_of_memory, list_memory
from clew.replay.exception_value import describe_names, describe_value
from clew.replay.frames import is_tool_file, is_user_file
from clew.replay.stack import is_machinery

if TYPE_CHECKING:
    from types import FrameType

    from clew.capture.torch.recorder import Recorder
    from clew.capture.torch.registry import Registry

_MOST_FRAMES: Final = 6
_MOST_BEFORE: Final = 8
_MOST_INPUTS: Final = 6
_MOST_RELATED: Final = 4
_GROUPS: Final[Any] = getattr(builtins, "BaseExceptionGroup", ())
"""Exceptions that hold others, from Python 3.11 on."""
_OUTPUT: Final = KIND_INDEX["output"]


def examine_exception(error: BaseException, recorder: Recorder) -> dict[str, Any] | None:
    """Return the card of an exception as data that fits JSON, or None where torch has nothing to do with it.

    Nothing is executed and no device is touched: what failed once may fail again.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, ClewError)):
        return None
    card = _examine(error, recorder)
    related = [(word, each, _examine(each, recorder)) for word, each in list_related(error)]
    if not card["is_telling"]:
        inner = next((each for _, _, each in related if each["is_telling"]), None)
        if inner is None:
            return None
        card |= {key: inner[key] for key in ("site", "modules", "call", "frames", "memory")}
    card["related"] = [
        {
            "how": word,
            "error": type(each).__name__,
            "message": read_message(each),
            "sentence": known["sentence"],
        }
        for word, each, known in related
    ]
    return card


def _examine(error: BaseException, recorder: Recorder) -> dict[str, Any]:
    frames = _frames_of(error)
    is_full = is_out_of_memory(error)
    path = _module_path(frames, recorder.registry, reads=not is_full)
    call = _failing_call(frames, reads=not is_full)
    own = _user_frames(frames, reads=not is_full)
    sentence = explain_message(error, call, path)
    has_tensors = any("facts" in value for frame in (*own, call) for value in frame["values"])
    return {
        "error": type(error).__name__,
        "message": read_message(error),
        "step": recorder.step,
        "site": path[-1]["site"] if path else "",
        "modules": path,
        "before": _outputs_before(recorder),
        "call": call,
        "frames": own,
        "sentence": sentence,
        "memory": list_memory() if is_full else [],
        "is_telling": bool(path or sentence or has_tensors),
    }


def list_related(error: BaseException) -> list[tuple[str, BaseException]]:
    """Return the exceptions behind one, with how they belong to it: causes, what was being handled, a group's own."""
    found: list[tuple[str, BaseException]] = []
    seen = {id(error)}
    waiting = [error]
    while waiting and len(found) < _MOST_RELATED:
        each = waiting.pop(0)
        inner = [("one of them", member) for member in (each.exceptions if isinstance(each, _GROUPS) else ())]
        if each.__cause__ is not None:
            inner.append(("caused by", each.__cause__))
        elif each.__context__ is not None and not each.__suppress_context__:
            inner.append(("while handling", each.__context__))
        for word, other in inner:
            if id(other) not in seen:
                seen.add(id(other))
                found.append((word, other))
                waiting.append(other)
    return found[:_MOST_RELATED]


def _frames_of(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the frames of a traceback with the line each was at, the outermost first."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _module_path(
    frames: list[tuple[FrameType, int]], registry: Registry, *, reads: bool
) -> list[dict[str, Any]]:
    """Return the modules that were being called, from the root inwards, with what each was given."""
    path: list[dict[str, Any]] = []
    seen: set[int] = set()
    for frame, _ in frames:
        # The locals of a forward may have been assigned anew; those of torch's own call have not.
        if frame.f_code.co_name != "_call_impl" or not is_tool_file(frame.f_code.co_filename):
            continue
        module = frame.f_locals.get("self")
        if not isinstance(module, torch.nn.Module) or id(module) in seen:
            continue
        seen.add(id(module))
        entry = registry.modules.get(id(module))
        given = (*frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {}))
        leaves = [describe_value(name, leaf, reads=reads) for name, leaf in walk(given)]
        path.append(
            {
                "site": entry.name if entry is not None else "",
                "type": type(module).__name__,
                "inputs": leaves[:_MOST_INPUTS],
            }
        )
    return path


def _failing_call(frames: list[tuple[FrameType, int]], *, reads: bool) -> dict[str, Any]:
    """Return the innermost statement that is not of torch's own machinery, with the values of its names."""
    if not frames:
        return {"file": "", "line": 0, "text": "", "values": []}
    telling = [pair for pair in frames if not is_machinery(pair[0].f_code.co_filename)]
    frame, line = (telling or frames)[-1]
    return _describe_frame(frame, line, reads=reads)


def _user_frames(frames: list[tuple[FrameType, int]], *, reads: bool) -> list[dict[str, Any]]:
    own = [(frame, line) for frame, line in frames if is_user_file(frame.f_code.co_filename)]
    # A function that calls itself stands there a thousand times.
    own = [
        pair
        for pair, last in zip(own, [None, *own], strict=False)
        if last is None or (pair[0].f_code, pair[1]) != (last[0].f_code, last[1])
    ]
    shown = own if len(own) <= _MOST_FRAMES else [own[0], *own[1 - _MOST_FRAMES :]]
    return [_describe_frame(frame, line, reads=reads) for frame, line in shown]


def _describe_frame(frame: FrameType, line: int, *, reads: bool) -> dict[str, Any]:
    file = frame.f_code.co_filename
    return {
        "file": file,
        "line": line,
        "function": frame.f_code.co_name,
        "text": linecache.getline(file, line).strip(),
        "values": describe_names(frame, line, reads=reads),
    }


def _outputs_before(recorder: Recorder) -> list[dict[str, Any]]:
    """Return the last outputs of modules in this step, as far as the step was being recorded."""
    sites = recorder.sites
    outputs = [key >> SITE_SHIFT for key in recorder.keys if key >= 0 and key >> KIND_SHIFT & 0xFF == _OUTPUT]
    return [
        {"site": sites[site].name, "shape": list(sites.shapes[site] or ())}
        for site in outputs[-_MOST_BEFORE:]
    ]
