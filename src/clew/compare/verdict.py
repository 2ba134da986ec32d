"""The verdict in words and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.compare.diff import Diff
    from clew.compare.diff_rows import Rows
    from clew.compare.diff_sides import Sides
    from clew.compare.origin import Origin
    from clew.model.record import Site

_PLACES = {
    "data": "before the forward pass",
    "weights": "in the weights",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "update": "in the optimizer's update",
}
_KINDS = {"grad_output": "gradient at the output", "grad": "gradient", "param": "weight"}
_CLASSES = {"initial-weight": "initial weight", "learning-rate": "learning rate"}


def say_origin(origin: Origin) -> str:
    """Return the verdict on runs that differ: step, place, reason and class of the cause, in one sentence."""
    op = origin.op.rpartition(".")[2]
    names = origin.site if origin.site_b in ("", origin.site) else f"{origin.site} ({origin.site_b} in b)"
    kind = _KINDS.get(origin.kind, origin.kind)
    # A batch and a loss are named after what they are.
    place = f"{kind} of {names}" if origin.kind not in ("batch", "loss") else names
    shown = f"{place} ({op})" if op and origin.kind not in ("param", "batch") else place
    cause = _CLASSES.get(origin.cause, origin.cause)
    rank = f" on rank {origin.rank}" if origin.rank else ""
    return (
        f"the runs part at step {origin.step}{rank} {_PLACES[origin.phase]}, first at the {shown}: {origin.reason} "
        f"(cause: {cause})"
    )


def say_identical(sides: Sides, rows: Rows) -> str:
    """Return the verdict on runs without a difference."""
    steps = len(np.unique(rows["step"]))
    hashed = bool(len(rows)) and bool(((rows["hash_a"] != 0) & (rows["hash_b"] != 0)).all())
    turned = any(pair.is_transposed or pair.parts for pair in sides.pairs)
    how = "identical" if hashed and not turned else "the same by their statistics"
    return f"the runs are {how}: {len(rows):,} records of {_count(steps, 'step')} are equal{say_lone(sides)}"


def say_lone(sides: Sides) -> str:
    """Return how many sites have no partner, where there are such."""
    alone = [(len(names), side) for names, side in ((sides.only_a, "a"), (sides.only_b, "b"))]
    told = [f"{_count(count, 'site')} of {side}" for count, side in alone if count]
    return f"; {' and '.join(told)} could not be compared" if told else ""


def say_close(sides: Sides, rows: Rows, origin: Origin, *, measured: bool) -> str:
    """Return the verdict on runs that differ by no more than is allowed."""
    what = "the noise between the baseline runs" if measured else "the rounding of their dtypes"
    return (
        f"the runs are equal within tolerance, not identical: {len(rows):,} records of "
        f"{_count(len(np.unique(rows['step'])), 'step')} differ by no more than {what}; "
        f"the first difference is at step {origin.step}, {origin.kind} of {origin.site}{say_lone(sides)}"
    )


def say_growth(origin: Origin, grown: Origin) -> str:
    """Return the reason of a difference that began as rounding and grew."""
    return (
        f"{origin.reason}; the difference grows from step to step and leaves the tolerance at step {grown.step}, "
        f"{grown.kind} of {grown.site}"
    )


def say_rounding_before(origin: Origin) -> str:
    """Return a note on the differences that came before the one that counts."""
    return f"smaller differences, within tolerance, begin at step {origin.step} with the {origin.kind} of {origin.site}"


def say_nothing_common(sides: Sides) -> str:
    """Return the verdict on runs that share no record."""
    if not any(len(run.sites) for run in (sides.a, sides.b)):
        return "nothing can be compared: no model was called in either run"
    if not sides.pairs:
        return "nothing can be compared: no site of one run stands for a site of the other; give names with --map"
    return "nothing can be compared: the runs have no step recorded in both"


def find_notes(sides: Sides, compared: NDArray[np.int64]) -> list[str]:
    """Return what was not compared, and what the runs say of themselves."""
    notes = []
    recorded = [np.unique(run.stats(columns=[]).codes("step")) for run in (sides.a, sides.b)]
    for name, steps in zip("ab", recorded, strict=True):
        missing = np.setdiff1d(steps, compared)
        if len(missing):
            notes.append(
                f"{_count(len(missing), 'step')} of run {name} not compared: the other has none of them"
            )
    for name, run in (("a", sides.a), ("b", sides.b)):
        notes += [f"run {name} was {note}" for note in run.info.notes if note.startswith("thinned")]
        notes += [f"run {name}: {problem}" for problem in run.problems]
        if run.state not in ("complete", "unknown"):  # the latter is among the problems
            notes.append(f"run {name} is not complete: {run.state}")
    kinds = [set(run.info.settings.get("kinds", ())) for run in (sides.a, sides.b)]
    if all(kinds) and kinds[0] != kinds[1]:
        notes.append(f"kinds recorded in one run only: {', '.join(sorted(kinds[0] ^ kinds[1]))}")
    notes += _say_fused(sides)
    return notes


def _say_fused(sides: Sides) -> list[str]:
    joined = sides.alignment.joined
    if not joined:
        return []
    first = joined[0]
    more = f", and {len(joined) - 1} more such" if len(joined) > 1 else ""
    limits = "how the parts lie in it and which of them differs they do not tell"
    both = f"{first.label('a')} of a and {first.label('b')} of b are compared as a whole, by statistics{more}"
    return [f"{both}: {limits}; clew ckpt diff and clew.assert_same do"]


def find_lone_module(sides: Sides) -> tuple[str, Site, int] | None:
    """Return side, site and number of the modules that one run alone executed, or None.

    A module around others that both runs have is a wrapper, and no difference by itself.
    """
    if sides.is_fragment:
        return None
    paired = {side: [name for pair in sides.pairs for name in pair.sites(side)] for side in "ab"}
    for side, names, sites in (
        ("a", sides.only_a, sides.sites_a),
        ("b", sides.only_b, sides.sites_b),
    ):
        lone = [sites[name] for name in names if sites[name].role == "module" and sites[name].order >= 0]
        lone = [site for site in lone if site.name not in sides.absorbed(side)]
        lone = [site for site in lone if not any(name.startswith(f"{site.name}.") for name in paired[side])]
        if lone:
            return side, min(lone, key=lambda site: site.order), len(lone)
    return None


def to_json(diff: Diff) -> dict[str, Any]:
    """Return a difference as plain data."""
    first = diff.first
    return {
        "same": diff.is_same,
        "identical": diff.is_identical,
        "first": None
        if first is None
        else {
            "step": first.step,
            "phase": first.phase,
            "site": first.site,
            "site_b": first.site_b or first.site,
            "kind": first.kind,
            "op": first.op,
            "rank": first.rank,
        },
        "cause": first.cause if first is not None else None,
        "sentence": diff.sentence,
        "tensors": list(diff.tensors),
        "only_a": list(diff.only_a),
        "only_b": list(diff.only_b),
        "renamed": list(diff.renamed),
        "fused": list(diff.alignment.fused),
        "steps": diff.steps,
        "operation": diff.operation,
        "notes": list(diff.notes),
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
