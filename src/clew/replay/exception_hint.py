"""The common mistakes behind an exception of torch, in a plain sentence each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.trace_failure import match_hint
from clew.replay.exception_shape import (
    tell_batched_product,
    tell_broadcast,
    tell_product,
    tell_stack,
    tell_target,
)
from clew.replay.exception_source import (
    tell_checkpoint,
    tell_dead_worker,
    tell_memory,
    tell_missing_key,
    tell_worker,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def explain_message(error: BaseException, call: dict[str, Any], path: list[dict[str, Any]]) -> str:
    """Return what went wrong and what helps, in the user's terms, or nothing for an exception that is not common."""
    message = read_message(error)
    if isinstance(error, RecursionError):
        return _tell_recursion(call)
    if isinstance(error, KeyError):
        return tell_missing_key(error, call["values"])
    tensors = _tensors_of(call, path)
    sentences = _SENTENCES if path else (*_SENTENCES, *_OUTSIDE_LAYERS)
    known = next(
        (
            tell(found, tensors)
            for pattern, tell in sentences
            if (found := re.search(pattern, message, re.DOTALL))
        ),
        "",
    ) or match_hint(message)
    module = next((step for step in reversed(path) if step["site"]), None)
    return f"in {module['site']} ({module['type']}): {known}" if known and module else known


def read_message(error: BaseException) -> str:
    """Return the text of an exception; one of the user's own may fail to give it."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its type says something, too
        return ""


def _tell_recursion(call: dict[str, Any]) -> str:
    function = call.get("function", "")
    where = f"{function} " if function else "a function "
    return f"{where}calls itself without end: look for a call of self(…) in its own forward, or a cycle of modules"


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
    (r"out of memory|can't allocate memory|not enough memory", tell_memory),
    (r"Error\(s\) in loading state_dict.*", tell_checkpoint),
    (r"Caught \w+ in DataLoader worker process (\d+).*", tell_worker),
    (r"DataLoader worker .*? is killed by signal: ([^.]*)", tell_dead_worker),
    (
        r"DataLoader worker .*? exited unexpectedly",
        _say("a worker process of a loader has ended by itself: with num_workers=0 its error shows here"),
    ),
    (
        r"(?:[Cc]an't pickle|[Cc]annot pickle|Can't get local object) (?:local object )?'?(.*?)'?(?: object)?$",
        _say(
            "{0} cannot be pickled, which processes that are spawned (loader workers) and torch.save need: define it "
            "at the top of a module, not inside a function and not as a lambda; or num_workers=0"
        ),
    ),
    (
        r"not compiled with CUDA enabled",
        _say(
            "this build of PyTorch cannot use a GPU: install one with CUDA, or choose the device by "
            "'cuda' if torch.cuda.is_available() else 'cpu'"
        ),
    ),
    (
        r"No CUDA GPUs are available|no NVIDIA driver|invalid device ordinal",
        _say("there is no such GPU here: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'"),
    ),
    (
        r"deserialize object on (?:a )?CUDA device",
        _say("the file was saved on a GPU: load it with torch.load(file, map_location='cpu')"),
    ),
    (
        r"leaf Variable that requires grad .*?in-place",
        _say("a weight is changed in place where gradients are counted: do so under torch.no_grad()"),
    ),
    (
        r"'NoneType' object has no attribute '(?:sum|mean|backward|shape|size|view|reshape|item|detach|to|dim)'",
        _say("a value is None where a tensor was meant: does the forward that made it return its result?"),
    ),
    (
        r"optimizer got an empty parameter list",
        _say(
            "the optimizer was given no weights: are the layers attributes of the model (lists of them an "
            "nn.ModuleList), and was parameters() used up before?"
        ),
    ),
    (
        r"can't optimize a non-leaf Tensor",
        _say("the optimizer was given the result of an operation: give it the nn.Parameter itself"),
    ),
    (
        r"expected target dtype to be Long",
        _say(
            "labels are class numbers: convert them with y.long(); probabilities need the shape of the scores"
        ),
    ),
    (
        r"all elements of input should be between 0 and 1",
        _say("binary_cross_entropy takes probabilities: use binary_cross_entropy_with_logits on scores"),
    ),
    (
        r"Target size \(torch.Size\(\[(.*?)\]\)\) must be the same as input size \(torch.Size\(\[(.*?)\]\)\)",
        tell_target,
    ),
    (
        r"Expected size for first two dimensions of batch2 tensor to be: \[(.*?)\] but got: \[(.*?)\]",
        tell_batched_product,
    ),
    (
        r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)",
        tell_broadcast,
    ),
    (
        r"stack expects each tensor to be equal size, but got \[(.*?)\] at entry (\d+) and \[(.*?)\] at entry (\d+)",
        tell_stack,
    ),
    (
        r"Boolean value of Tensor with more than one value is ambiguous",
        _say("a tensor of several elements is neither true nor false: use .any() or .all()"),
    ),
    (r"same device|device type|expected device", _tell_devices),
    (r"same dtype|expected scalar type|Found dtype|result type \w+ can't be cast", _tell_dtypes),
)
"""What torch says, and how to put it plainly."""
_OUTSIDE_LAYERS: Final = (
    (r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", tell_product),
)
"""What is told otherwise where a layer has refused its input."""
