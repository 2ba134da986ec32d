"""The common mistakes behind an exception of torch, in a plain sentence each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.trace_failure import match_hint

if TYPE_CHECKING:
    from collections.abc import Callable


def explain_message(error: BaseException, call: dict[str, Any], path: list[dict[str, Any]]) -> str:
    """Return what went wrong and what helps, in the user's terms, or nothing for an exception that is not common."""
    message = str(error)
    tensors = _tensors_of(call, path)
    for pattern, tell in _SENTENCES:
        found = re.search(pattern, message, re.DOTALL)
        if found:
            return tell(found, tensors)
    known = match_hint(message)
    module = next((step for step in reversed(path) if step["site"]), None)
    return f"in {module['site']} ({module['type']}): {known}" if known and module else known


def _tensors_of(call: dict[str, Any], path: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tensors of the failing call by name; where there are none, those given to the module."""
    own = {value["name"]: value["facts"] for value in call["values"] if "facts" in value}
    if own or not path:
        return own
    return {value["name"] or "input": value["facts"] for value in path[-1]["inputs"] if "facts" in value}


def _tell_label(found: re.Match[str], tensors: dict[str, dict[str, Any]]) -> str:
    label = found[1]
    scores = next(
        (each for each in tensors.values() if "float" in each["dtype"] and len(each["shape"]) > 1), None
    )
    if scores is None:
        return (
            f"the label {label} is not a class: labels must lie between 0 and the number of classes less one"
        )
    classes = scores["shape"][1]
    return (
        f"the label {label} is not a class: the scores have {classes} classes, so labels must lie between 0 and "
        f"{classes - 1}; correct the labels, or give the last layer more outputs"
    )


def _tell_index(_: re.Match[str], tensors: dict[str, dict[str, Any]]) -> str:
    table = next(
        (each for each in tensors.values() if "float" in each["dtype"] and len(each["shape"]) == 2), None
    )
    index = next((each for each in tensors.values() if "int" in each["dtype"] and each["stats"]), None)
    if table is None or index is None:
        return "an index is not below the number of rows: check the range of the input or the size of the vocabulary"
    rows = table["shape"][0]
    return (
        f"the indices run from {index['stats']['min']:.0f} to {index['stats']['max']:.0f}, but the table has {rows} "
        f"rows (0 to {rows - 1}): check the input, or make num_embeddings larger"
    )


def _tell_devices(_: re.Match[str], tensors: dict[str, dict[str, Any]]) -> str:
    return _tell_difference("device", "device", tensors) + "move one of them with .to(device)"


def _tell_dtypes(_: re.Match[str], tensors: dict[str, dict[str, Any]]) -> str:
    return (
        _tell_difference("dtype", "dtype", tensors)
        + "convert one of them, as in x.float() or x.to(weight.dtype)"
    )


def _tell_difference(key: str, word: str, tensors: dict[str, dict[str, Any]]) -> str:
    places = {name: facts[key] for name, facts in tensors.items()}
    if len(set(places.values())) < 2:
        return f"the tensors of this operation have a different {word}: "
    listed = ", ".join(f"{name} {place}" for name, place in places.items())
    return f"the tensors of this operation have a different {word} ({listed}): "


def _tell_in_place(found: re.Match[str], _: dict[str, dict[str, Any]]) -> str:
    maker = re.search(r"output \d+ of (\w+?)(?:Backward\d*)?(?:,|$| )", found[0])
    what = f"a tensor of shape [{found[1]}]"
    made = f", made by {maker[1]}," if maker else ""
    return (
        f"{what}{made} was changed in place (+=, relu_, x[i] = …) after the forward pass had kept it for the "
        "backward pass: write x = x + …, or clone it before the change; "
        "torch.autograd.set_detect_anomaly(True) shows the line that kept it"
    )


def _say(text: str) -> Callable[[re.Match[str], dict[str, dict[str, Any]]], str]:
    return lambda found, _: text.format(*found.groups())


_SENTENCES: Final[tuple[tuple[str, Callable[[re.Match[str], dict[str, dict[str, Any]]], str]], ...]] = (
    (r"Target (-?\d+) is out of bounds", _tell_label),
    (r"index out of range in self", _tell_index),
    (
        r"index (-?\d+) is out of bounds for dimension (\d+) with size (\d+)",
        _say("the index {0} does not exist: dimension {1} has {2} elements, so indices end at {2} less one"),
    ),
    (
        r"modified by an inplace operation: \[[\w.]+ \[(.*?)\]\].*",
        _tell_in_place,
    ),
    (
        r"backward through the graph a second time",
        _say(
            "the graph was used by an earlier backward and is gone: compute the loss anew for each backward, detach "
            "what is carried over from the step before (h = h.detach()), or keep it with retain_graph=True"
        ),
    ),
    (
        r"does not require grad and does not have a grad_fn",
        _say(
            "the loss does not depend on any weight: look for detach(), no_grad(), argmax, .item() or a frozen model "
            "between the weights and the loss"
        ),
    ),
    (
        r"grad can be implicitly created only for scalar outputs",
        _say("the loss has more than one element: reduce it with .mean() or .sum() before backward()"),
    ),
    (
        r"device-side assert",
        _say(
            "a kernel on the GPU refused its input, most often a label or an index out of range: run again with "
            "CUDA_LAUNCH_BLOCKING=1, or on the CPU, to see where"
        ),
    ),
    (
        r"out of memory|can't allocate memory|not enough memory",
        _say("the memory is full: use a smaller batch, shorter inputs, or activation checkpointing"),
    ),
    (
        r"Error\(s\) in loading state_dict",
        _say(
            "the checkpoint and the model differ in names or shapes: clew ckpt show lists what the file holds"
        ),
    ),
    (r"same device|device type|expected device", _tell_devices),
    (r"same dtype|expected scalar type|Found dtype|result type \w+ can't be cast", _tell_dtypes),
)
"""What torch says, and how to put it plainly."""
