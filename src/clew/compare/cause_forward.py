"""The origin of a difference inside a forward pass: precision, structure, randomness, arguments or the operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clew.compare.diff_sides import differing_arguments, differing_seeds, float_dtypes
from clew.compare.name import short_type
from clew.compare.origin import Origin
from clew.model.schema import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from clew.compare.cause import StepCase
    from clew.compare.diff_rows import Columns
    from clew.model.record import Site

_FORWARD = ("input", "output")


def find_forward_origin(case: StepCase) -> Origin | None:
    """Return the first output, in order of execution, that differs, and why; None when none does."""
    row = case.first_of(*_FORWARD)
    lone = _find_lone(case, row)
    if lone is not None:
        return lone
    if row < 0:
        return None
    dtypes = float_dtypes(case.sides, int(case.rows["pair"][row]))
    if dtypes:
        found = case.origin(row, "forward", "precision", f"it is {dtypes[0]} in a and {dtypes[1]} in b")
        # Arrays by hand come in whatever type their library likes; a model does not change its own by chance.
        return found if case.sides.is_by_hand else found.changed(is_within=False)
    if not case.sides.is_fragment and (other := _find_moved(case, row)):
        return case.origin(row, "forward", "structure", f"the runs execute it and {other} in another order")
    return judge_module(case, row)


def judge_module(case: StepCase, row: int) -> Origin:
    """Return why the module of a row gives another result from equal inputs and weights."""
    if narrow := _find_narrow(case, row):
        return case.origin(row, "forward", "precision", narrow, is_within=False)
    for a, b in _owners(case, row):
        found = _judge_arguments(case, row, a, b)
        if found is not None:
            return found
    equal = _say_equal(case)
    if case.errors[row] <= case.tolerances[case.rows["pair"][row]]:
        reason = f"{equal} and the results differ by no more than rounding"
        return case.origin(row, "forward", "precision", reason)
    if seeds := differing_seeds(case.sides):
        reason = f"{equal}; the seeds are not ({seeds[0]} in a, {seeds[1]} in b)"
        return case.origin(row, "forward", "randomness", reason)
    return case.origin(row, "forward", "operation", f"{equal}: {_say_where(case, row)}")


def _say_equal(case: StepCase) -> str:
    known = case.rows.is_kind("batch").any() and case.rows.is_kind("param").any()
    return (
        "batch, weights and all outputs before it are equal"
        if known
        else "all that was recorded before it is equal"
    )


def _say_where(case: StepCase, row: int) -> str:
    """Return what may compute something else: the module, or the code around it that makes its input."""
    site, _ = case.sides.site_pair(int(case.rows["pair"][row]))
    around = site.name.rpartition(".")[0]
    by_id = {each.id: each.name for each in case.sides.sites_a.values()}
    parent = around if around in case.sides.sites_a else by_id.get(site.parent, "")
    if KINDS[case.rows["kind"][row]] == "input":
        return f"the code of {parent or 'the model'} makes another input for it"
    if case.rows.is_kind("input").any() or not parent:
        return "it computes something else"
    return f"it, or the code of {parent} right before it, computes something else"


def _owners(case: StepCase, row: int) -> Iterator[tuple[Site, Site]]:
    """Yield the module of a row and the modules around it, as pairs, from the inside out."""
    sides = case.sides
    names = sides.alignment.names
    site, other = sides.site_pair(int(case.rows["pair"][row]))
    if site.role == "module":
        yield site, other
    by_id = {each.id: each for each in sides.sites_a.values()}
    while site.parent in by_id:
        site = by_id[site.parent]
        if site.name in names:
            yield site, sides.sites_b[names[site.name]]


def _judge_arguments(case: StepCase, row: int, a: Site, b: Site) -> Origin | None:
    own = case.sides.site_pair(int(case.rows["pair"][row]))
    is_own = a.name in (own[0].name, own[0].name.rpartition(".")[0])
    place: dict[str, Any] = {} if a.name == own[0].name else {"site": a.name, "site_b": b.name, "op": a.type}
    kinds = {short_type(a.type), short_type(b.type)}
    is_random = any(is_dropout(kind) for kind in kinds)
    arguments = differing_arguments(a, b)
    if place:
        # The mode of a module around says little: its parts have modes of their own.
        arguments.pop("training", None)
    if is_own and a.type and b.type and len(kinds) > 1 and not a.name.startswith("("):
        reason = f"it is {_class(a)} in a and {_class(b)} in b"
        cause = "randomness" if is_random else "argument"
        return case.origin(row, "forward", cause, reason, is_within=False, **place)
    if not arguments:
        if not (is_random and is_own):
            return None
        reason = "it drew other random numbers: inputs are equal, the state of the generators was not"
        return case.origin(row, "forward", "randomness", reason, is_within=False, **place)
    told = ", ".join(f"{name} is {x} in a and {y} in b" for name, (x, y) in list(arguments.items())[:4])
    is_random |= any(is_dropout(name) for name in arguments)
    cause = "randomness" if is_random else "argument"
    return case.origin(row, "forward", cause, told, is_within=False, **place)


def is_dropout(word: str) -> bool:
    """Whether a class or an attribute is about leaving elements out at random."""
    return any(part in word.lower() for part in ("dropout", "droppath", "drop_path", "stochasticdepth"))


def _class(site: Site) -> str:
    return site.type.rpartition(".")[2]


def _find_lone(case: StepCase, row: int) -> Origin | None:
    """Return an output that one run alone has, when it stands right before the first difference and is new."""
    if case.sides.is_fragment or row < 0:
        return None
    for side, lone, seqs in (("a", case.lone_a, case.rows["seq"]), ("b", case.lone_b, case.rows["seq_b"])):
        run, sites = (case.sides.a, case.sides.sites_a) if side == "a" else (case.sides.b, case.sides.sites_b)
        index = _first_guilty(case, row, lone, seqs, side)
        if index < 0:
            continue
        site = sites[run.sites[lone["site"][index]].name]
        cause = "randomness" if is_dropout(site.type) else "structure"
        what = "calls it here" if lone["pair"][index] >= 0 else "has it"
        reason = f"only run {side} {what}, and what comes after it differs"
        return Origin(case.step, "forward", site.name, "output", cause, reason, side=side, op=site.type)
    return None


def _first_guilty(case: StepCase, row: int, lone: Columns, seqs: Any, side: str) -> int:
    """Return the first lone output between the last equal output and the first different one, or -1."""
    if not lone:
        return -1
    forward = case.rows.is_kind(*_FORWARD) & ~case.different
    before = seqs[forward & (seqs < seqs[row])]
    low = int(before.max()) if len(before) else -1
    # What the other run has too, under whatever name, is not what makes the difference.
    ours, theirs = ("hash_a", "hash_b") if side == "a" else ("hash_b", "hash_a")
    known = case.rows.is_kind("batch", *_FORWARD)
    passed = {*case.rows[ours][known & ~case.different].tolist(), *case.rows[theirs][known].tolist()}
    outputs = np.isin(lone["kind"], [KINDS.index(kind) for kind in _FORWARD])
    between = np.flatnonzero(outputs & (lone["seq"] > low) & (lone["seq"] < seqs[row]))
    for index in between[np.argsort(lone["seq"][between])]:
        if int(lone["hash"][index]) not in passed:
            return int(index)
    return -1


def _find_moved(case: StepCase, row: int) -> str:
    """Return the first site whose output came before this one in one run and after it in the other, or nothing."""
    seq, seq_b = case.rows["seq"], case.rows["seq_b"]
    swapped = case.rows.is_kind("output") & ((seq < seq[row]) != (seq_b < seq_b[row]))
    found = np.flatnonzero(swapped)
    if not len(found):
        return ""
    pair = int(case.rows["pair"][found[np.argmin(seq[found])]])
    return case.sides.pairs[pair].a


def _find_narrow(case: StepCase, row: int) -> str:
    """Return a sentence when one side's extremes are those of the other, rounded to a half-precision type."""
    a, b = (
        np.array([side[name][row] for name in ("min", "max")], np.float32)
        for side in (case.rows.a, case.rows.b)
    )
    is_small = case.errors[row] <= case.tolerances[case.rows["pair"][row]]
    if is_small or not np.allclose(a, b, rtol=2.0**-6, atol=0.0):
        return ""
    for name, mask in (("bfloat16", 0xFFFF), ("float16", 0x1FFF)):
        narrow = [_is_narrow(ends, mask) for ends in (a, b)]
        if narrow[0] != narrow[1]:
            side = "a" if narrow[0] else "b"
            return f"in {side} its values are those of {name}: computed in it and converted afterwards"
    return ""


def _is_narrow(ends: NDArray[np.float32], mask: int) -> bool:
    bits = ends[ends != 0].view(np.uint32)
    return bool(len(bits)) and not (bits & mask).any()
