"""Expressions that a person types at a breakpoint: compiled with clear errors, evaluated without a trace.

What is evaluated is the text of the user's own command line or keyboard, in the user's own process, as pdb does it.
Nothing that comes from a file of a run is ever evaluated.
"""

from __future__ import annotations

import ast
import builtins
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

_FILE = "<typed>"
_LONGEST_VALUE = 40


def compile_condition(text: str) -> CodeType:
    """Return a condition as code; what is not one expression is a UsageError that shows the place."""
    source = text.strip()
    if not source:
        raise UsageError(
            "the condition after 'if' is empty", next_step="write an expression: if out.max() > 100"
        )
    try:
        return compile(source, _FILE, "eval")
    except (SyntaxError, ValueError) as error:
        raise _explain(source, error) from None


def evaluate(code: CodeType, names: Mapping[str, Any]) -> Any:
    """Return the value of compiled code over some names."""
    space = {"__builtins__": builtins, **names}
    return eval(code, space)  # noqa: S307 - typed by the user, who could type it into Python as well


class Scratch:
    """Names that a person has assigned at the prompt, on top of those of the place; they live as long as it does."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}

    def run(self, text: str, names: Mapping[str, Any]) -> Any:
        """Evaluate an expression, or execute statements; names they assign stay here and go nowhere else."""
        source = text.strip()
        try:
            tree = ast.parse(source, _FILE)
        except (SyntaxError, ValueError) as error:
            raise _explain(source, error) from None
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        space = {"__builtins__": builtins, **names, **self.names}
        before = dict(space)
        if tree.body:
            exec(compile(tree, _FILE, "exec"), space)  # noqa: S102 - see the head of this file
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _FILE, "eval"), space)  # noqa: S307 - as above
        self.names |= {
            name: value for name, value in space.items() if name not in before or before[name] is not value
        }
        return value


def differs(value: Any, before: Any) -> bool:
    """Say whether a watched value has changed; what cannot be compared is taken to have."""
    try:
        return bool((value != before).any()) if hasattr(value, "any") else bool(value != before)
    except Exception:  # noqa: BLE001 - shapes that do not fit each other
        return True


def spell(value: Any) -> str:
    """Return a watched value in few words: a number as such, of anything longer its form."""
    if hasattr(value, "numel"):
        return (
            f"{value.item():.6g}" if value.numel() == 1 and not value.is_complex() else f"{list(value.shape)}"
        )
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"a {type(value).__name__}"


def _explain(source: str, error: SyntaxError | ValueError) -> UsageError:
    if not isinstance(error, SyntaxError):
        return UsageError(f"'{source}' is no Python: {error}")
    line = source.splitlines()[(error.lineno or 1) - 1] if source else ""
    column = max((error.offset or 1) - 1, 0)
    marked = f"{line[:column]}>>>{line[column:]}" if line else source
    return UsageError(
        f"'{source}' is no Python expression: {error.msg}",
        where=marked,
        next_step="names to use: out, args, kwargs, grad, stats, module, step, site, torch, and those of the frame",
    )
