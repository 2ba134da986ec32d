"""Checks of the rehearsal that look at the data: labels in range and mixed, workers that differ."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.leaves import walk
from clew.model.preflight import Check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.replay.preflight_losses import LossCall
    from clew.replay.preflight_subject import Subject

_BATCHES: Final = 8
_LEAST: Final = 16
_PROBES: Final = 3


def check_labels(subject: Subject) -> Check:
    """Look at the labels of some batches: within the range of the loss, and mixed."""
    name = "labels"
    subject.rewind()
    calls = subject.run().calls
    if not calls:
        return Check(name, "not checked", "no call of a known loss function was seen")
    for call in calls:
        if problem := _find_out_of_range(call):
            return Check(name, "failed", problem, "check how the labels are made")
    named = [call for call in calls if call.has_class_targets]
    if not named:
        return Check(name, "ok", "targets are within the range of the loss")
    return _judge_order(name, subject, named[0])


def _find_out_of_range(call: LossCall) -> str:
    target = call.target.detach()
    if not target.numel():
        return "the target is empty"
    if call.has_class_targets:
        counted = target[target != call.ignored]
        if not counted.numel():
            return "every label is ignored: the loss is about nothing"
        low, high = int(counted.min()), int(counted.max())
        if low < 0 or high >= call.class_count:
            return f"labels run from {low} to {high}, the model has {call.class_count} classes"
    elif call.name in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
        low_share, high_share = float(target.min()), float(target.max())
        if low_share < 0 or high_share > 1:
            return f"targets run from {low_share:g} to {high_share:g}, {call.name} wants 0 to 1"
    elif not bool(torch.isfinite(target.double()).all()):
        return "the targets hold NaN or infinity"
    return ""


def _judge_order(name: str, subject: Subject, call: LossCall) -> Check:
    batches = _labels_of_batches(subject, call)
    counted = [each[each != call.ignored].flatten() for each in batches]
    flat = [each for each in counted if each.numel()]
    every = torch.cat(flat) if flat else torch.empty(0)
    kinds = _count_kinds(every)
    evidence = {"classes": call.class_count, "seen": kinds, "labels": every.numel(), "batches": len(flat)}
    text = f"in range, {kinds} of {call.class_count} classes in {every.numel()} labels of {len(flat)} batches"
    if every.numel() < _LEAST or len(flat) < 2 or call.target.dim() > 1:
        return Check(name, "ok", f"in range, below {call.class_count}", evidence=evidence)
    one_each = all(_count_kinds(each) == 1 for each in flat) and min(map(len, flat)) >= 4
    ordered = bool((every[1:] >= every[:-1]).all()) or bool((every[1:] <= every[:-1]).all())
    if kinds == 1 and call.class_count > 1:
        hint = "shuffle=True, or mix the data when it is written: later batches will undo what these teach"
        return Check(name, "warning", f"all {every.numel()} labels are of one class", hint, evidence)
    if ordered or one_each:
        how = "sorted" if ordered else "one class to a batch"
        return Check(
            name, "failed", f"the labels come {how}: {text}", "shuffle=True in the DataLoader", evidence
        )
    return Check(name, "ok", f"{text}, mixed", evidence=evidence)


def _count_kinds(labels: torch.Tensor) -> int:
    return len(set(labels.tolist()))


def _labels_of_batches(subject: Subject, call: LossCall) -> list[torch.Tensor]:
    """Return the labels of several batches: from a new turn of the loader, or those of the first steps."""
    path = _find_label_path(subject, call)
    if path is None or subject.loader is None:
        return [each for each in subject.targets if not each.is_floating_point()]
    labels = []
    loader = _without_workers(subject.loader)
    for batch in itertools.islice(iter(loader), _BATCHES):
        found = dict(walk(batch)).get(path)
        if found is not None:
            labels.append(found)
    return labels


def _find_label_path(subject: Subject, call: LossCall) -> str | None:
    for batch in reversed(subject.batches):
        for path, leaf in walk(batch):
            if leaf.shape == call.target.shape and bool((leaf == call.target).all()):
                return path
    return None


def _without_workers(loader: Any) -> Any:
    if not loader.num_workers:
        return loader
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return torch.utils.data.DataLoader(
            loader.dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn
        )
    return torch.utils.data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn
    )


# ------------------------------------------------------------------------ workers


def check_workers(subject: Subject) -> Check:
    """Compare what two workers give: not the same samples, and not the same random numbers."""
    name = "workers"
    loader = subject.loader
    if loader is None:
        return Check(name, "not checked", "no DataLoader was seen")
    if loader.num_workers < 2:
        return Check(
            name, "not checked", f"the loader has {loader.num_workers or 'no'} workers: set num_workers"
        )
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return _judge_streams(name, loader)
    return _judge_randomness(name, loader)


def _judge_streams(name: str, loader: Any) -> Check:
    probe = _probe(loader, batch_size=loader.batch_size, drop_last=loader.drop_last)
    # Workers take turns: batch 0 comes from the first, batch 1 from the second.
    batches = [_hold(batch) for batch in itertools.islice(iter(probe), 2)]
    if len(batches) < 2:
        return Check(name, "not checked", "the stream gave fewer than two batches")
    if _are_same(*batches):
        hint = "divide the stream by torch.utils.data.get_worker_info().id in __iter__"
        return Check(name, "failed", "every worker gives the same samples, so each comes several times", hint)
    return Check(name, "ok", f"{loader.num_workers} workers give different samples")


def _judge_randomness(name: str, loader: Any) -> Check:
    probe = _probe(loader, sampler=[0] * (2 * _PROBES), batch_size=1)
    batches = [_hold(batch) for batch in iter(probe)]
    first, second = batches[0::2], batches[1::2]
    if all(_are_same(first[0], each) for each in (*first[1:], *second)):
        return Check(name, "ok", "a sample is the same from every worker: nothing random in it")
    if all(_are_same(one, other) for one, other in zip(first, second, strict=True)):
        hint = "make the generator in worker_init_fn, or from torch.initial_seed() in __getitem__"
        return Check(name, "failed", "every worker draws the same random numbers", hint)
    return Check(name, "ok", f"{loader.num_workers} workers draw different random numbers")


def _probe(loader: Any, **changes: Any) -> Any:
    return torch.utils.data.DataLoader(
        loader.dataset,
        num_workers=2,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        generator=torch.Generator().manual_seed(0),
        multiprocessing_context="fork",
        **changes,
    )


def _hold(batch: Any) -> list[torch.Tensor]:
    return [leaf.clone() for _, leaf in walk(batch)]


def _are_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
