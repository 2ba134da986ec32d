"""The language of watchpoints: ``SITES:KINDS EXPRESSION``, parsed without running anything.

    layers.*:grad l2 > 100
    fc*:param unchanged
    *:output nan > 0 or abs_max > 1e4
    @ReLU:output zero_percentage >= 99
    *:grad l2 > 10 * prev.l2
    loss:scalar value > 10
    weight_change_too_large(abs_mean_update_ratio_gt=1)

Python's own parser reads the expression; only numbers, names of statistics, comparisons, arithmetic, and/or/not and
the named conditions are let through, and what is let through is computed here, never executed.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.doctor.watch_condition import ANY, CONDITIONS, Condition, choose_parameters
from clew.doctor.watch_rows import SCALAR_WORDS, WORDS
from clew.errors import UsageError, suggest
from clew.model.glob import compile_globs, split_patterns, translate
from clew.model.schema import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.doctor.watch_rows import ScalarRows, StepRows

    Rows = StepRows | ScalarRows

_LONGEST: Final = 500
_COMPARE: Final[dict[type, tuple[str, Callable[[Any, Any], Any]]]] = {
    ast.Gt: (">", operator.gt), ast.Lt: ("<", operator.lt), ast.GtE: (">=", operator.ge),
    ast.LtE: ("<=", operator.le), ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne),
}  # fmt: skip
_ARITHMETIC: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: np.divide,
}  # fmt: skip
SCALAR: Final = "scalar"
"""Stands for the kind where a watchpoint is about numbers of the step, by name: loss, lr, time.data …"""

_COUNTS_OF_BAD: Final = {"nan", "pos_inf", "neg_inf", "inf", "nonfinite"}
"""An expression that asks for these judges tensors with NaN or infinity, others do not."""


@dataclass(frozen=True)
class Watch:
    """One watchpoint: where it looks, and a named condition or an expression."""

    text: str
    is_site: Callable[[str], bool]
    types: Callable[[str], bool] | None
    kinds: tuple[str, ...]
    condition: Condition | None = None
    parameters: dict[str, float] = field(default_factory=dict)
    expression: ast.expr | None = None
    names: frozenset[str] = frozenset()

    @property
    def judges_bad(self) -> bool:
        """Whether tensors with NaN or infinity are judged."""
        if self.condition is not None:
            return self.condition.is_overflow
        return bool(self.names & _COUNTS_OF_BAD)

    @property
    def needs_previous(self) -> bool:
        """Whether it compares with the recorded step before."""
        return any(name.startswith("prev.") for name in self.names)


def parse_watch(text: str) -> Watch:
    """Return the watchpoint of a text; raises with what is wrong and what is known."""
    if len(text) > _LONGEST:
        raise UsageError(f"the watchpoint is longer than {_LONGEST} characters")
    where, body = _split(text.strip())
    tree = _parse_body(body, text)
    found = _find_condition(tree)
    if found is not None:
        condition, given = found
        sites, types, kinds = _parse_place(where, condition.kinds, text)
        if kinds == (SCALAR,):
            raise UsageError(
                "conditions judge tensors, not the numbers of a step",
                where=text,
                next_step="compare its value: loss:scalar value > 10",
            )
        return Watch(text, sites, types, kinds, condition, choose_parameters(condition, given))
    sites, types, kinds = _parse_place(where, ANY, text)
    words = SCALAR_WORDS if kinds == (SCALAR,) else WORDS
    names = frozenset(_check(tree, text, words, is_truth=True))
    return Watch(text, sites, types, kinds, expression=tree, names=names)


def _split(text: str) -> tuple[str, str]:
    """Return the place and the rest: a place ends at the first blank and has a colon before its kinds."""
    found = re.match(r"(\S*:[\w,{}*]+)\s+(.+)", text, re.DOTALL)
    return (found[1], found[2]) if found else ("", text)


def _parse_place(
    where: str, kinds: tuple[str, ...], text: str
) -> tuple[Callable[[str], bool], Callable[[str], bool] | None, tuple[str, ...]]:
    sites, _, wanted = where.rpartition(":") if where else ("*", "", "")
    if wanted == SCALAR:
        kinds = (SCALAR,)
    elif wanted and wanted != "*":
        listed = split_patterns(wanted.strip("{}"))
        for kind in listed:
            if kind not in KINDS:
                raise UsageError(
                    f"unknown kind '{kind}'",
                    where=text,
                    next_step=suggest(kind, (*KINDS, SCALAR))
                    or f"known kinds: {', '.join((*KINDS, SCALAR))}",
                )
        kinds = listed
    if sites.startswith("@"):
        pattern = re.compile(translate(sites[1:]))
        return (lambda _: True), (lambda name: pattern.fullmatch(name) is not None), kinds
    return compile_globs(split_patterns(sites or "*")), None, kinds


def _parse_body(body: str, text: str) -> ast.expr:
    try:
        return ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UsageError(
            f"the watchpoint '{body}' cannot be read",
            where=text,
            next_step="write it like 'layers.*:grad l2 > 100' or 'fc*:param unchanged'",
        ) from error


def _find_condition(tree: ast.expr) -> tuple[Condition, dict[str, float]] | None:
    """Return the named condition a text consists of, with the parameters it sets."""
    name, given = tree, {}
    if isinstance(tree, ast.Call):
        if tree.args or any(keyword.arg is None for keyword in tree.keywords):
            raise UsageError("a condition takes its parameters by name", next_step="GV(abs_mean_lt=1e-9)")
        name = tree.func
        given = {str(keyword.arg): _number(keyword.value) for keyword in tree.keywords}
    if not isinstance(name, ast.Name):
        return None
    wanted = {"unchanged": "WNC", "overflow": "TO"}.get(name.id, name.id)
    if wanted in CONDITIONS:
        return CONDITIONS[wanted], given
    if isinstance(tree, ast.Call):
        raise UsageError(f"unknown condition '{name.id}'", next_step=suggest(name.id, CONDITIONS) or _known())
    return None


def _known() -> str:
    return "known: " + ", ".join(dict.fromkeys(each.id for each in CONDITIONS.values()))


def _number(node: ast.expr) -> float:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        return float(node.value)
    raise UsageError(f"'{ast.unparse(node)}' is no number", next_step="write a plain number, such as 1e-9")


def _check(node: ast.expr, text: str, words: tuple[str, ...], *, is_truth: bool = False) -> list[str]:
    """Return the names an expression asks for; raises for everything that is not of the language."""
    if isinstance(node, ast.BoolOp):
        return [name for part in node.values for name in _check(part, text, words, is_truth=True)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _check(node.operand, text, words, is_truth=True)
    if isinstance(node, ast.Compare) and all(type(each) in _COMPARE for each in node.ops):
        return [name for part in (node.left, *node.comparators) for name in _check(part, text, words)]
    if not is_truth:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _check(node.left, text, words) + _check(node.right, text, words)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return _check(node.operand, text, words)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return []
    name = _name_of(node)
    if name is not None:
        return [_check_name(name, text, words, is_truth=is_truth)]
    raise UsageError(
        f"'{ast.unparse(node)}' is not part of the language of watchpoints",
        where=text,
        next_step="use comparisons of statistics with numbers, and, or, not",
    )


def _name_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "prev":
        return f"prev.{node.attr}"
    return None


def _check_name(name: str, text: str, words: tuple[str, ...], *, is_truth: bool) -> str:
    plain = name.removeprefix("prev.")
    if plain not in words or is_truth:
        hint = suggest(plain, (*words, *CONDITIONS, "unchanged"))
        what = (
            f"'{name}' alone is neither true nor false" if plain in words else f"unknown statistic '{plain}'"
        )
        raise UsageError(
            what,
            where=text,
            next_step=f"compare it: {name} > 0" if plain in words else hint or f"known: {', '.join(words)}",
        )
    return name


def evaluate(node: ast.expr, rows: Rows) -> Any:
    """Return the value of an expression for every row: numbers or truth values."""
    if isinstance(node, ast.BoolOp):
        parts = [evaluate(part, rows) for part in node.values]
        combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return combine.reduce(parts)
    if isinstance(node, ast.UnaryOp):
        value = evaluate(node.operand, rows)
        return np.logical_not(value) if isinstance(node.op, ast.Not) else -value
    if isinstance(node, ast.Compare):
        values = [evaluate(part, rows) for part in (node.left, *node.comparators)]
        truths = [_COMPARE[type(op)][1](*values[at : at + 2]) for at, op in enumerate(node.ops)]
        return np.logical_and.reduce([np.broadcast_to(truth, len(rows)) for truth in truths])
    if isinstance(node, ast.BinOp):
        with np.errstate(all="ignore"):
            return _ARITHMETIC[type(node.op)](evaluate(node.left, rows), evaluate(node.right, rows))
    if isinstance(node, ast.Constant):
        return _number(node)
    name = _name_of(node)
    assert name is not None  # _check has let nothing else through
    return rows.column(name)


def explain(node: ast.expr, rows: Rows, row: int) -> dict[str, dict[str, float]]:
    """Return the comparisons that are true for a row, each with its preset and its actual value."""
    if isinstance(node, ast.BoolOp):
        return {key: value for part in node.values for key, value in explain(part, rows, row).items()}
    if not isinstance(node, ast.Compare):
        return {}
    values = [_at(evaluate(part, rows), row) for part in (node.left, *node.comparators)]
    sides = [ast.unparse(part) for part in (node.left, *node.comparators)]
    return {
        f"{sides[at]} {_COMPARE[type(op)][0]} {sides[at + 1]}": {
            "preset": values[at + 1],
            "actual": values[at],
        }
        for at, op in enumerate(node.ops)
        if _COMPARE[type(op)][1](values[at], values[at + 1])
    }


def _at(value: Any, row: int) -> float:
    return float(value[row]) if isinstance(value, np.ndarray) else float(value)
