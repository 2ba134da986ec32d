"""Checks of the rehearsal that change the input: samples apart from each other, batch sizes, the future."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from clew.capture.torch.leaves import walk
from clew.model.preflight import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.capture.torch.flight import RootCall
    from clew.replay.preflight_subject import Seen, Subject

_LEAK: Final = 1e-3
_FEW: Final = 5
_UNSTEADY: Final = "in evaluation mode the same input gives another output each time"


class _Batch(NamedTuple):
    """A root call whose inputs have one sample per row, and how many."""

    call: RootCall
    size: int


def check_samples(subject: Subject) -> Check:
    """Replace one sample: the outputs of the others must stay as they are."""
    name = "samples"
    found = _find_batch(subject)
    if isinstance(found, str):
        return Check(name, "not checked", found)
    _prepare(subject)
    rows = list(range(found.size))
    if not _is_steady(subject, found):
        return Check(name, "not checked", _UNSTEADY)
    before = _outputs(subject, found, rows)
    # Either end: what flows along the rows in one direction, as in a recurrent layer, shows at one of them only.
    after_last = _outputs(subject, found, [*rows[:-1], rows[0]])
    after_first = _outputs(subject, found, [rows[-1], *rows[1:]])
    differences = [
        max(_difference(one[:-1], last[:-1]), _difference(one[1:], first[1:]))
        for one, last, first in zip(before, after_last, after_first, strict=True)
        if one.dim() and one.shape == last.shape == first.shape and one.shape[0] == found.size
    ]
    if not differences:
        return Check(name, "not checked", "no output has one row for each sample")
    worst = max(differences)
    evidence = {"relative_difference": worst, "batch_size": found.size}
    if worst > _LEAK:
        hint = "look for a softmax, mean, norm or reshape over the batch dimension, or attention with batch_first wrong"
        text = f"another sample changes the outputs of the other {found.size - 1} by {worst:.1%}"
        return Check(name, "failed", text, hint, evidence)
    return Check(name, "ok", f"in evaluation mode, {found.size} samples", evidence=evidence)


def check_batch_size(subject: Subject) -> Check:
    """Evaluate five samples together and one by one: the outputs must be the same."""
    name = "batch-size"
    found = _find_batch(subject)
    if isinstance(found, str):
        return Check(name, "not checked", found)
    _prepare(subject)
    if not _is_steady(subject, found):
        return Check(name, "not checked", _UNSTEADY)
    few = min(_FEW, found.size)
    rows = list(range(few))
    whole = _try(lambda: _outputs(subject, found, rows))
    single = _try(lambda: [_outputs(subject, found, [row]) for row in rows])
    for outputs, count in ((whole, few), (single, 1)):
        if isinstance(outputs, str):
            hint = f"a batch size stands fixed in the model: the batch had {found.size}"
            return Check(name, "failed", f"{count} samples do not go through: {outputs}", hint)
    return _compare_sizes(name, whole, single, few=few)


def _compare_sizes(name: str, whole: Any, single: Any, *, few: int) -> Check:
    worst = 0.0
    compared = 0
    for index, together in enumerate(whole):
        if not together.dim() or together.shape[0] != few:
            continue
        for row, outputs in enumerate(single):
            alone = outputs[index] if index < len(outputs) else None
            if alone is None or alone.shape != together[row : row + 1].shape:
                shape = "nothing" if alone is None else list(alone.shape)
                text = f"one sample gives shape {shape}, a row of {few} has {list(together[row : row + 1].shape)}"
                return Check(
                    name, "failed", text, "look for squeeze() without a dimension, or a fixed reshape"
                )
            worst = max(worst, _difference(together[row : row + 1], alone))
        compared += 1
    if not compared:
        return Check(name, "not checked", "no output has one row for each sample")
    evidence = {"relative_difference": worst}
    if worst > _LEAK:
        hint = "something is computed over the batch in evaluation mode, too"
        return Check(name, "failed", f"one by one the outputs differ by {worst:.1%}", hint, evidence)
    return Check(name, "ok", f"{few} samples together and one by one give the same", evidence=evidence)


# ------------------------------------------------------------------------ what a batch is


def _find_batch(subject: Subject) -> _Batch | str:
    """Return the call whose inputs have one row per sample, or why that cannot be told."""
    if not subject.roots:
        return "no call of a model was seen"
    call = subject.roots[0]
    leaves = [leaf for _, leaf in walk((call.args, call.kwargs)) if leaf.dim() and leaf.grad_fn is None]
    if not leaves:
        return "the model is not given tensors with rows"
    size = int(leaves[0].shape[0])
    if size < 2:
        return "the batch has one sample"
    if any(size in leaf.shape[1:] and leaf.dim() == 2 and leaf.shape[0] == leaf.shape[1] for leaf in leaves):
        return "an input is square: rows may be nodes of a graph, not samples"
    if any(leaf.shape[0] != size or leaf.is_sparse for leaf in leaves):
        return "the inputs do not have the same number of rows: they may not be samples"
    if not _comes_from_loader(subject, leaves[0]) and (kind := _time_first(subject)):
        return f"{kind} takes the time first: rows may be moments, not samples"
    return _Batch(call, size)


def _comes_from_loader(subject: Subject, leaf: torch.Tensor) -> bool:
    """Return whether a loader gave this tensor: it puts samples into rows."""
    given = [each for batch in subject.batches for _, each in walk(batch)]
    return any(each.dim() and each.shape[0] == leaf.shape[0] for each in given)


def _time_first(subject: Subject) -> str:
    for model in subject.models:
        for module in model.modules():
            if getattr(module, "batch_first", None) is False:
                return type(module).__name__
    return ""


def _prepare(subject: Subject) -> None:
    subject.rewind()
    for model in subject.models:
        model.eval()


def _is_steady(subject: Subject, batch: _Batch) -> bool:
    """Return whether the same input gives the same output again, with other random numbers, too."""
    rows = list(range(batch.size))
    one = _outputs(subject, batch, rows)
    # The generator has moved on: a model that draws from it in evaluation mode shows.
    other = _outputs(subject, batch, rows, keep_random=True)
    return len(one) == len(other) and all(
        a.shape == b.shape and not _difference(a, b) for a, b in zip(one, other, strict=True)
    )


def _outputs(
    subject: Subject, batch: _Batch, rows: list[int], *, keep_random: bool = False
) -> list[torch.Tensor]:
    """Return the outputs for some samples of the batch, with the same random numbers each time unless kept."""
    if not keep_random:
        subject.random()

    def take(leaf: torch.Tensor) -> torch.Tensor:
        return leaf[rows] if leaf.dim() and leaf.shape[0] == batch.size else leaf

    args, kwargs = replace_tensors((batch.call.args, batch.call.kwargs), take)
    with torch.no_grad():
        result = batch.call.module(*args, **kwargs)
    return [leaf.detach() for _, leaf in walk(result) if leaf.is_floating_point()]


def replace_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return lists, tuples and dicts with their tensors changed; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replace_tensors(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replace_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {key: replace_tensors(part, change) for key, part in value.items()}
    return value


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference over the largest deviation from the mean: small outputs do not hide it."""
    if not one.numel():
        return 0.0
    a, b = one.double(), other.double()
    both = torch.isfinite(a) & torch.isfinite(b)
    if not bool(both.any()):
        return 0.0
    scale = float((a - a[both].mean())[both].abs().max()) or float(a[both].abs().max()) or 1.0
    noise = float(a[both].abs().max()) * 1e-5
    worst = float((a - b)[both].abs().max())
    return 0.0 if worst <= noise else worst / scale


def _try(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - what went wrong is the finding
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# ------------------------------------------------------------------------ the future


def check_future(subject: Subject) -> Check:
    """Where the targets are the inputs moved by one place, change an input: earlier outputs must stay as they are."""
    name = "future"
    subject.rewind()
    found = _find_sequence(subject, subject.run())
    if isinstance(found, str):
        return Check(name, "not checked", found)
    call, path, time = found
    _prepare(subject)
    tokens = dict(walk((call.args, call.kwargs)))[path]
    length = int(tokens.shape[time])
    place = length - max(1, length // 4)
    outputs = _run_sequence(subject, call, tokens, tokens)
    changed = tokens.clone()
    later = changed.narrow(time, place, length - place)
    later.copy_(_other_tokens(later, tokens))
    after = _run_sequence(subject, call, tokens, changed)
    for one, other in zip(outputs, after, strict=False):
        shaped = _by_time(one, tokens), _by_time(other, tokens)
        if shaped[0] is None or shaped[1] is None:
            continue
        early = [each.narrow(time, 0, place) for each in shaped if each is not None]
        worst = _difference(early[0], early[1])
        evidence = {"relative_difference": worst, "changed_from": place, "length": length}
        if worst > _LEAK:
            text = f"inputs from place {place} on change the outputs before it by {worst:.1%}"
            hint = (
                "the attention needs a causal mask (is_causal=True), a convolution padding on the left only"
            )
            return Check(name, "failed", text, hint, evidence)
        return Check(
            name, "ok", f"outputs before place {place} of {length} stay as they are", evidence=evidence
        )
    return Check(name, "not checked", "no output has one row for each place of the sequence")


def _find_sequence(subject: Subject, seen: Seen) -> tuple[RootCall, str, int] | str:
    """Return a call, the path of its tokens and their dimension of time, if the targets are those tokens, moved."""
    targets = [call.target for call in seen.calls if call.has_class_targets]
    if not targets:
        return "no classification over a sequence was seen"
    for call in subject.roots:
        for path, leaf in walk((call.args, call.kwargs)):
            if leaf.is_floating_point() or leaf.dim() != 2 or leaf.is_complex():
                continue
            for target in targets:
                for time in (1, 0):
                    if _is_moved(leaf, target.flatten(), time):
                        return call, path, time
    return "the targets are not the inputs moved by one place"


def _is_moved(tokens: torch.Tensor, target: torch.Tensor, time: int) -> bool:
    """Return whether a flat target holds the tokens one place later; ignored places (below 0) do not count."""
    length = int(tokens.shape[time])
    if length < 4:
        return False
    later = tokens.narrow(time, 1, length - 1)
    if target.numel() == later.numel():
        moved, against = later.flatten(), target
    elif target.numel() == tokens.numel():
        moved, against = later.flatten(), target.view(tokens.shape).narrow(time, 0, length - 1).flatten()
    else:
        return False
    counted = against >= 0
    same = (moved == against)[counted]
    plain = tokens.narrow(time, 0, length - 1).flatten()
    return bool(counted.any()) and float(same.double().mean()) > 0.95 and not bool((plain == moved).all())


def _other_tokens(later: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return other tokens of the same vocabulary for each place."""
    known: torch.Tensor = tokens.unique()  # type: ignore[no-untyped-call]
    position = torch.searchsorted(known, later.contiguous())
    other: torch.Tensor = known[(position + 1) % len(known)]
    return other


def _run_sequence(
    subject: Subject, call: RootCall, tokens: torch.Tensor, instead: torch.Tensor
) -> list[torch.Tensor]:
    subject.random()
    args, kwargs = replace_tensors((call.args, call.kwargs), lambda leaf: instead if leaf is tokens else leaf)
    with torch.no_grad():
        result = call.module(*args, **kwargs)
    return [leaf for _, leaf in walk(result) if leaf.is_floating_point() and leaf.dim() >= 2]


def _by_time(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return an output with the dimensions of the tokens first, or None if it has not one row for each of them."""
    if output.shape[:2] == tokens.shape:
        return output
    if output.shape[0] == tokens.numel():
        return output.reshape(*tokens.shape, -1)
    if output.dim() >= 3 and (output.shape[0], output.shape[2]) == tuple(tokens.shape):
        return output.transpose(1, 2)  # classes stand in the middle, as cross entropy wants them
    return None
