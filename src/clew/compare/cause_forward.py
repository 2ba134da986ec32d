"""The origin of a difference inside a forward pass: precision, structure, randomness, arguments or the operation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.compare.code import draws, judge_code, narrows
from clew.compare.diff_sides import code_of, differing_arguments, float_dtypes, later_arguments
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
HALF_ERROR: Final = 2.0**-8
"""How far the statistics of a product in half precision are off at most."""


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
    owners = list(_owners(case, row))
    for judge in (_judge_arguments, _judge_code, _judge_draws):
        for a, b in owners:
            found = judge(case, row, a, b)
            if found is not None:
                return found
    equal = _say_equal(case)
    error, pair = case.errors[row], case.rows["pair"][row]
    if error <= case.tolerances[pair]:
        reason = f"{equal} and the results differ by no more than rounding"
        return case.origin(row, "forward", "precision", reason)
    if error <= HALF_ERROR and _is_product(case, row):
        reason = f"{equal}, so are arguments and code, and the results differ as those of lower precision do"
        return case.origin(row, "forward", "precision", reason, is_within=False)
    return case.origin(row, "forward", "operation", f"{equal}: {_say_where(case, row)}")


def _is_product(case: StepCase, row: int) -> bool:
    """Whether a row is of a module that multiplies matrices, with arguments and code known for both sides."""
    site = next((site for site, _ in _owners(case, row)), None)
    if site is None:
        return False
    kind = short_type(site.type)
    return bool(site.args) and any(word in kind for word in ("linear", "conv", "attention", "bilinear"))


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
    pair = int(case.rows["pair"][row])
    site, other = sides.site_pair(pair)
    if site.role == "module" and not sides.pairs[pair].parts:
        yield site, other
    by_id = {each.id: each for each in sides.sites_a.values()}
    while site.parent in by_id:
        site = by_id[site.parent]
        if site.name in names:
            yield site, sides.sites_b[names[site.name]]


def _place(case: StepCase, row: int, a: Site, b: Site) -> dict[str, Any]:
    """Return what an origin must say when the cause lies in a module around the row's own."""
    own = case.sides.site_pair(int(case.rows["pair"][row]))[0]
    return {} if a.name == own.name else {"site": a.name, "site_b": b.name, "op": a.type}


def _judge_arguments(case: StepCase, row: int, a: Site, b: Site) -> Origin | None:
    own = case.sides.site_pair(int(case.rows["pair"][row]))
    is_own = a.name in (own[0].name, own[0].name.rpartition(".")[0])
    place = _place(case, row, a, b)
    kinds = {short_type(a.type), short_type(b.type)}
    arguments = differing_arguments(a, b)
    if not arguments and not case.is_first:
        arguments = later_arguments(a, b)
    if place and not _is_leaf_of(own[0], a):
        # The mode of a module around says little: its parts have modes of their own.
        arguments.pop("training", None)
    is_random = any(is_dropout(kind) for kind in kinds)
    if is_own and a.type and b.type and len(kinds) > 1 and not a.name.startswith("("):
        reason = f"it is {_class(a)} in a and {_class(b)} in b"
        cause = "randomness" if is_random else "precision" if _is_narrowing(a, b) else "argument"
        return case.origin(row, "forward", cause, reason, **_as_fact(case, a, b), **place)
    if not arguments:
        return None
    told = ", ".join(f"{name} is {x} in a and {y} in b" for name, (x, y) in list(arguments.items())[:4])
    is_random |= any(is_dropout(name) for name in arguments)
    cause = "randomness" if is_random else "argument"
    return case.origin(row, "forward", cause, told, is_within=False, **place)


def _is_narrowing(a: Site, b: Site) -> bool:
    """Whether one of two classes alone has code that converts to a narrow type."""
    return narrows(code_of(a)) != narrows(code_of(b))


def _is_leaf_of(leaf: Site, module: Site) -> bool:
    return leaf.role == "leaf" and leaf.parent == module.id


def _judge_code(case: StepCase, row: int, a: Site, b: Site) -> Origin | None:
    """The words of the code tell what was changed there, as long as both runs had one kind of Python."""
    if case.sides.a.info.python.split(".")[:2] != case.sides.b.info.python.split(".")[:2]:
        return None
    change = judge_code(code_of(a), code_of(b))
    if change is None:
        return None
    more = _as_fact(case, a, b) | _place(case, row, a, b)
    return case.origin(row, "forward", change.cause, change.reason, **more)


def _as_fact(case: StepCase, a: Site, b: Site) -> dict[str, Any]:
    """Return what makes a difference count however small: not where another form of the same weights explains it."""
    return {} if case.sides.is_around_parts(a, b) else {"is_within": False}


def _judge_draws(case: StepCase, row: int, a: Site, b: Site) -> Origin | None:
    """A module that leaves elements out at random has left out others, with all around it equal."""
    own = case.sides.site_pair(int(case.rows["pair"][row]))[0]
    if a.name not in (own.name, own.name.rpartition(".")[0], own.name.partition("[")[0]):
        return None
    if not any(_draws(site) for site in (a, b)):
        return None
    if is_dropout(a.type) and 0 < case.rows.a["zero"][row] == case.rows.b["zero"][row] > 1:
        return None  # as many zeros: it left out the same, and was given something else
    reason = "it drew other random numbers: inputs are equal, the state of the generators was not"
    return case.origin(row, "forward", "randomness", reason, is_within=False, **_place(case, row, a, b))


def _draws(site: Site) -> bool:
    """Whether a module draws random numbers: dropout with a share above zero, or code that calls it."""
    share = re.search(r"(?:^|; )(?:p|rate|drop_prob|dropout|dropout_p)=([\d.e-]+)(?:;|$)", site.args)
    if share is not None and float(share.group(1)) == 0.0:
        return False
    return (
        is_dropout(site.type) or (share is not None and "dropout" in share.group(0)) or draws(code_of(site))
    )


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
        if (found := _judge_bypass(case, row)) is not None:
            return found
        cause = "randomness" if is_dropout(site.type) else "structure"
        what = "calls it here" if lone["pair"][index] >= 0 else "has it"
        reason = f"only run {side} {what}, and what comes after it differs"
        return Origin(case.step, "forward", site.name, "output", cause, reason, side=side, op=site.type)
    return None


def _judge_bypass(case: StepCase, row: int) -> Origin | None:
    """Return the code around that computes in lower precision or at random what the other run has a module for."""
    found = [_judge_code(case, row, a, b) for a, b in _owners(case, row)]
    return next((one for one in found if one is not None and one.cause in ("precision", "randomness")), None)


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
    run, absorbed = (case.sides.a if side == "a" else case.sides.b), case.sides.absorbed(side)
    for index in between[np.argsort(lone["seq"][between])]:
        is_known = run.sites[lone["site"][index]].name.partition("[")[0] in absorbed
        if int(lone["hash"][index]) not in passed and not is_known:
            return int(index)
    return -1


def _find_moved(case: StepCase, row: int) -> str:
    """Return the first site whose output came before this one in one run and after it in the other, or nothing."""
    seq, seq_b = case.rows["seq"], case.rows["seq_b"]
    # Parts have no one place in the order.
    is_one = np.array([not pair.parts for pair in case.sides.pairs])[case.rows["pair"]]
    if not is_one[row]:
        return ""
    swapped = is_one & case.rows.is_kind("output") & ((seq < seq[row]) != (seq_b < seq_b[row]))
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
