"""A forward pass that broke: which operation, with which shapes, at which line, and what usually helps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from clew.capture.torch.trace_build import SourceNames
from clew.capture.torch.trace_recorder import is_user_code
from clew.errors import TraceFailed

if TYPE_CHECKING:
    from types import TracebackType

    from clew.capture.torch.trace_recorder import Failure, OperationRecorder, RawOperation

_SHOWN: Final = 4
"""How many operations before the failing one are told."""


def explain_failure(recorder: OperationRecorder, error: Exception, name: str) -> TraceFailed:
    """Return the error that tells where a forward pass broke and what led there."""
    failure = recorder.failure if recorder.failure and is_same(recorder.failure.error, error) else None
    site = failure.site if failure else ""
    source = (failure.source if failure else None) or _nearest_line(error.__traceback__)
    lines = [_headline(failure, error, site or name)]
    if failure and failure.op:
        lines.append(f"  called: {_call_text(failure)}")
    before = [_operation_text(recorder, each) for each in recorder.operations[-_SHOWN:]]
    if before:
        lines.append("  before: " + "; ".join(before))
    place = ", ".join(part for part in SourceNames().look_up(source) if part)
    return TraceFailed("\n".join(lines), where=place or site or name, next_step=find_hint(str(error)))


def explain_backward(recorder: OperationRecorder, error: Exception, name: str) -> TraceFailed:
    """Return the error that tells why a backward pass broke; for an overwritten value, who may have done it."""
    message = str(error).strip().splitlines() or [""]
    what = f"the backward pass of '{name}' raised {type(error).__name__}: {message[0].partition(' Hint:')[0]}"
    if "inplace operation" not in str(error):
        return TraceFailed(what, next_step=find_hint(str(error)))
    sources = SourceNames()
    writers = [
        f"{operation.op} in '{operation.site or name}' {sources.place(operation.source)}".strip()
        for operation in recorder.operations
        if operation.op.endswith("_") or operation.kwargs.get("inplace") is True
    ]
    return TraceFailed(
        what,
        where="; ".join(writers[-_SHOWN:]),
        next_step="one of these wrote over a value that the backward pass needs: do it out of place",
    )


def is_same(inner: BaseException, outer: BaseException | None) -> bool:
    """Whether an exception is another one or among what led to it."""
    seen = 0
    while outer is not None and seen < 20:
        if inner is outer:
            return True
        outer, seen = outer.__cause__ or outer.__context__, seen + 1
    return False


def find_hint(message: str) -> str:
    """Return what usually helps against an error of torch, or where to look when it is not a common one."""
    known = match_hint(message)
    return (
        known
        or "run the model on this input without clew; the traceback above this message is the model's own"
    )


def match_hint(message: str) -> str:
    """Return what usually helps against an error of torch, or nothing."""
    for pattern, hint in _HINTS:
        match = re.search(pattern, message, re.DOTALL)
        if match:
            return hint.format(*match.groups())
    return ""


def _headline(failure: Failure | None, error: Exception, place: str) -> str:
    message = str(error).strip().splitlines()
    first = f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
    doing = f"{failure.op} in '{place}'" if failure and failure.op else f"the forward pass of '{place}'"
    return f"{doing} raised {first}"


def _call_text(failure: Failure) -> str:
    named = (f"{key}={value}" for key, value in failure.kwargs.items())
    return f"{failure.op}({', '.join((*failure.args, *named))})"


def _operation_text(recorder: OperationRecorder, operation: RawOperation) -> str:
    made = (", ".join(str(size) for size in recorder.tensors[each].shape) for each in operation.outputs)
    place = f"{operation.site} " if operation.site else ""
    return f"{place}{operation.op} -> {' '.join(f'({each})' for each in made)}"


def _nearest_line(trace: TracebackType | None) -> tuple[str, int] | None:
    found = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_code(file):
            found = (file, trace.tb_lineno)
        trace = trace.tb_next
    return found


_HINTS: Final[tuple[tuple[str, str], ...]] = (
    (
        r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)",
        "the layer expects {2} features and got {1}: set in_features={1}, or flatten or transpose the input",
    ),
    (
        r"expected input\[.*?\] to have (\d+) channels, but got (\d+) channels",
        "the layer expects {0} channels and got {1}: set in_channels={1}, or put the channels second",
    ),
    (
        r"Given normalized_shape=\[(.*?)\].* but got input of size\s?\[(.*?)\]",
        "the input ({1}) must end in ({0}): change normalized_shape or the layer before",
    ),
    (
        r"Kernel size: \((.*?)\)\. Kernel size can't be greater",
        "the input has become smaller than the kernel ({0}): use a larger input, less pooling or padding",
    ),
    (
        r"Expected (\dD) \(unbatched\) or (\dD) \(batched\) input",
        "the input must be {1}, or {0} without a batch: add or drop a dimension, as in x.unsqueeze(0)",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "batch normalisation in training mode needs a larger batch; or call model.eval()",
    ),
    (
        r"shape '\[(.*?)\]' is invalid for input of size (\d+)",
        "the sizes ({0}) do not multiply to {1}: a size was fixed for another input; take it from x.shape",
    ),
    (
        r"view size is not compatible",
        "the tensor is not contiguous here: use reshape instead of view",
    ),
    (
        r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)",
        "dimension {2} is {0} in one tensor and {1} in the other: check the layers that made them",
    ),
    (
        r"Sizes of tensors must match except in dimension (\d+)\. Expected size (\d+) but got size (\d+)",
        "only dimension {0} may differ when joining, and {1} meets {2}: join along another, or check what made them",
    ),
    (
        r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)",
        "the output has {0} rows and the target {1}: flatten both alike, or take the target of the same batch",
    ),
    (
        r"Target (-?\d+) is out of bounds",
        "class {0} is not among the outputs: make the last layer wider, or count the classes from 0",
    ),
    (
        r"must be Tensor, not numpy\.ndarray",
        "the input is a numpy array: give torch.from_numpy(x)",
    ),
    (
        r"must be Tensor, not (\w+)",
        "the input is a {0} where the layer wants a tensor: give torch.as_tensor(x), or check the inputs' order",
    ),
    (
        r"argument #1 'indices' to have one of the following scalar types: Long, Int",
        "an embedding looks up whole numbers: give x.long(), or --input int64:2,16:0..100 in the shell",
    ),
    (
        r"index out of range",
        "an index is not below num_embeddings: check the range of the input or the size of the vocabulary",
    ),
    (
        r"(?:same device|device type|FloatTensor\) and weight type \(torch\.cuda)",
        "model and input are on different devices: x.to(next(model.parameters()).device)",
    ),
    (
        r"(?:same dtype|expected scalar type|should be the same)",
        "the input's dtype differs from that of the weights: x.to(next(model.parameters()).dtype)",
    ),
    (
        r"missing \d+ required (?:positional|keyword-only) arguments?: (.*)",
        "the model needs more inputs: give {0} too, in the shell with --input 4,3,128,128",
    ),
    (
        r"got an unexpected keyword argument '(.*?)'",
        "the model's forward has no argument '{0}'",
    ),
    (
        r"takes \d+ positional arguments? but \d+ were given",
        "the model's forward takes fewer inputs: give one argument per input",
    ),
    (
        r"(?:meta tensor|on meta)",
        "the model reads a value, and tensors on the meta device have none: trace it on a real device",
    ),
    (
        r"out of memory",
        "use a smaller batch, or trace the model on the meta device: shapes only, no memory",
    ),
)
"""What torch says, and what to do about it; numbers of the message fill the braces."""
