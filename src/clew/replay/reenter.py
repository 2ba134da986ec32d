"""Finding a piece of the user's program that executes the current step again: a loop's body, or a function."""

from __future__ import annotations

import ast
import gc
import linecache
import sys
import types
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from clew.replay.frames import is_tool_file, is_user_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_VARIADIC: Final = 0x04
_KEYWORDS: Final = 0x08
_GENERATOR: Final = 0x20 | 0x80 | 0x200
_MOST_WAYS: Final = 4

Known: TypeAlias = "dict[int, tuple[int, types.CodeType]]"
"""Frames by identity, each with a line and its code."""


class Way(NamedTuple):
    """One way to execute the step again, and what it is called when we tell of it.

    ``is_turn``: it is one turn of a loop that gathers gradients, and begins where the backward before it ended.
    """

    name: str
    run: Callable[[], object]
    is_turn: bool = False


def frames_outside_tools() -> list[FrameType]:
    """Return the frames of the user and of libraries such as trainers, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if not is_tool_file(frame.f_code.co_filename):
            found.append(frame)
        frame = frame.f_back
    return found


def find_ways(known: Known, *, has_gathered: bool = False) -> list[Way]:
    """Return the ways to execute this step again, the most faithful first.

    ``has_gathered``: there were backward passes in this step already, perhaps in earlier turns of a loop inside it.

    ``known``: the frames that were there when the last step ended, with the lines they were at and their code. The
    innermost of them holds the training loop; frames inside it were entered in this step and can be called again.
    """
    frames = frames_outside_tools()
    loop, inner = _split(frames, known)
    ways = []
    if loop is not None and is_user_file(loop.f_code.co_filename):
        ways += _enter_loop(loop, _line_of(loop, known), has_gathered=has_gathered)
    for frame in reversed(inner):
        call = make_call(frame)
        if call is not None:
            ways.append(Way(f"function {frame.f_code.co_name}", call))
        if len(ways) == _MOST_WAYS:
            break
    if loop is None:
        ways += _find_library_loop(frames, known)
    return ways


def _enter_loop(frame: FrameType, ended_at: int | None, *, has_gathered: bool) -> list[Way]:
    """A turn of a loop with several optimizers has several steps: what comes after the last one is tried first.

    So is a turn of a loop inside it that gathers gradients: the turns before it cannot be had again.
    """
    inner = compile_loop_body(frame, ended_at=frame.f_lineno) if has_gathered else None
    rest = compile_loop_body(frame, ended_at=ended_at, only_rest=True)
    whole = compile_loop_body(frame, ended_at=ended_at)
    named = (("body of the inner loop", inner), ("rest of the loop body", rest), ("loop body", whole))
    return [Way(name, run) for name, run in named if run is not None]


def _find_library_loop(frames: list[FrameType], known: Known) -> list[Way]:
    """A trainer's own loop still has the batch where a function has already taken it apart (``inputs.pop``)."""
    for frame in frames:
        line = _line_of(frame, known)
        if (known and line is None) or is_user_file(frame.f_code.co_filename):
            continue
        loop = _find_loop(frame, line)
        body = compile_loop_body(frame, ended_at=line) if loop is not None and _calls_step(loop) else None
        if body is not None:
            return [Way(f"loop body of {frame.f_code.co_name}", body)]
    return []


def _line_of(frame: FrameType, known: Known) -> int | None:
    """Return the line at which a frame was when the last step ended, None for a frame of this step."""
    line, code = known.get(id(frame), (None, None))
    return line if code is frame.f_code else None


def _split(frames: list[FrameType], known: Known) -> tuple[FrameType | None, list[FrameType]]:
    """Return the frame of the loop and the frames inside it.

    A frame's identity may be used again by a frame of this step, so a known frame counts only where it stands in
    a loop around both lines. In the first step it is the innermost frame that stands in a loop at all.
    """
    for position, frame in enumerate(frames):
        if known and _line_of(frame, known) is None:
            continue
        if is_user_file(frame.f_code.co_filename) and _find_loop(frame, _line_of(frame, known)) is not None:
            return frame, frames[:position]
    # A loop in a library: what it called in this step, as far as that can be told.
    inner = [frame for frame in frames if _line_of(frame, known) is None]
    return None, inner


# -------------------------------------------------------------------- a loop's body


def compile_loop_body(
    frame: FrameType, *, ended_at: int | None = None, only_rest: bool = False
) -> Callable[[], object] | None:
    """Return the body of the loop a frame stands in, as a function that runs it once on copies of the names.

    ``only_rest``: the part after the statement in which the last step ended, None where that is not this turn.
    """
    found = _find_loop(frame, ended_at)
    if found is None:
        return None
    statements = found.body if not only_rest else _find_rest(found, ended_at, frame.f_lineno)
    if not statements:
        return None
    once = ast.parse("for _clew_once in (None,):\n    pass").body[0]
    assert isinstance(once, ast.For)
    # One namespace for all, so that functions and comprehensions in the body see the names around them.
    names = {**frame.f_globals, **frame.f_locals}
    once.body = [
        _Plain().visit(_keep_fetched(statement, statements, frame, names)) for statement in statements
    ]
    module = ast.fix_missing_locations(ast.Module(body=[once], type_ignores=[]))
    try:
        code = compile(module, frame.f_code.co_filename, "exec")
    except SyntaxError:
        return None

    def run() -> None:
        exec(code, names)  # noqa: S102 - the user's own loop, in a copy of the process

    return run


def _keep_fetched(
    statement: ast.stmt, body: list[ast.stmt], frame: FrameType, names: dict[str, Any]
) -> ast.stmt:
    """Turn ``x, y = next(batches)`` into the values it gave in this turn: the iterator would give the next ones.

    Only where it has been executed and nothing else in the body gives these names another value.
    """
    targets = _fetched_names(statement)
    if not targets or (statement.end_lineno or statement.lineno) >= frame.f_lineno:
        return statement
    written = [
        node.id for part in body for node in ast.walk(part)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]  # fmt: skip
    if any(written.count(target) != 1 or target not in frame.f_locals for target in targets):
        return statement
    assert isinstance(statement, ast.Assign)
    kept = f"_clew_kept_{len(names)}"
    values = tuple(frame.f_locals[target] for target in targets)
    names[kept] = values[0] if isinstance(statement.targets[0], ast.Name) else values
    value = ast.copy_location(ast.Name(kept, ast.Load()), statement.value)
    return ast.copy_location(ast.Assign(targets=statement.targets, value=value), statement)


def _fetched_names(statement: ast.stmt) -> list[str]:
    """Return the names that a statement gives to what ``next`` returns, none for any other statement."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    call, target = statement.value, statement.targets[0]
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "next"):
        return []
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return names if len(names) == len(parts) else []


def _find_loop(frame: FrameType, ended_at: int | None = None) -> ast.For | ast.While | None:
    """Return the loop that a frame's step is one turn of.

    That is the innermost loop around both the present line and the line where the last step ended; in the first
    step the innermost one that calls some ``step``, or else the innermost one.
    """
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    first = 0 if frame.f_code.co_name == "<module>" else frame.f_code.co_firstlineno
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.While)) and node.lineno >= first and _holds(node, frame.f_lineno)
    ]
    around.sort(key=lambda node: -node.lineno)
    if ended_at is not None:
        return next((node for node in around if _holds(node, ended_at)), None)
    stepping = (node for node in around if _calls_step(node))
    return next(stepping, around[0] if around else None)


def _find_rest(loop: ast.For | ast.While, ended_at: int | None, line: int) -> list[ast.stmt]:
    """Return the statements after the one in which the last step ended, if that lies before the present line."""
    before = [
        position
        for position, statement in enumerate(loop.body)
        if ended_at is not None and statement.lineno <= ended_at <= (statement.end_lineno or statement.lineno)
    ]
    if not before or (loop.body[before[-1]].end_lineno or line) >= line:
        return []
    return loop.body[before[-1] + 1 :]


def _calls_step(loop: ast.For | ast.While) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
        for node in ast.walk(loop)
    )


def _holds(node: ast.For | ast.While, line: int) -> bool:
    return node.body[0].lineno <= line <= (node.body[-1].end_lineno or node.body[-1].lineno)


class _Plain(ast.NodeTransformer):
    """Makes statements of a function's loop fit for a plain namespace: no return, no scope declarations."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """A return leaves the step."""
        return ast.copy_location(ast.Break(), node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        """All names live in one namespace already."""
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        """All names live in one namespace already."""
        return ast.copy_location(ast.Pass(), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leave functions inside the loop alone: their returns are their own."""
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """Leave lambdas alone."""
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Leave classes alone."""
        return node


# -------------------------------------------------------------------- a function


def make_call(frame: FrameType) -> Callable[[], object] | None:
    """Return a call of a frame's function with the arguments it has now, or None where that cannot be had."""
    code = frame.f_code
    if code.co_flags & _GENERATOR or code.co_name in ("<module>", "<listcomp>", "<genexpr>", "<lambda>"):
        return None
    function = next(_functions_of(code, frame), None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    local = frame.f_locals
    if function is None or any(name not in local for name in names):
        return None
    positional = [local[name] for name in names[: code.co_argcount]]
    keywords = {name: local[name] for name in names[code.co_argcount :]}
    rest = list(code.co_varnames[len(names) :])
    if code.co_flags & _VARIADIC:
        positional += list(local.get(rest.pop(0), ()))
    if code.co_flags & _KEYWORDS:
        keywords.update(local.get(rest.pop(0), {}))
    return lambda: function(*positional, **keywords)


def _functions_of(code: types.CodeType, frame: FrameType) -> Iterator[types.FunctionType]:
    """Yield functions with this code, those that share the frame's globals first."""
    found = [thing for thing in gc.get_referrers(code) if isinstance(thing, types.FunctionType)]
    found.sort(key=lambda function: function.__globals__ is not frame.f_globals)
    yield from found
    # After gc.freeze() the collector does not know what refers to what; names still do.
    for thing in _things_of_this_name(code, frame):
        for function in _unwrap(thing):
            if function.__code__ is code:
                yield function


def _things_of_this_name(code: types.CodeType, frame: FrameType) -> Iterator[object]:
    """Yield what a function may be known as: to its class, to its module, to the function that made it."""
    name = code.co_name
    if code.co_argcount and code.co_varnames[0] in frame.f_locals:
        owner = frame.f_locals[code.co_varnames[0]]
        for place in (*type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ())):
            yield vars(place).get(name)
    yield frame.f_globals.get(name)
    caller = frame.f_back
    while caller is not None:
        yield caller.f_locals.get(name)
        caller = caller.f_back


def _unwrap(thing: object) -> Iterator[types.FunctionType]:
    """Yield a function and those that its decorators keep inside it."""
    while thing is not None:
        thing = getattr(thing, "__func__", thing)
        if isinstance(thing, types.FunctionType):
            yield thing
        thing = getattr(thing, "__wrapped__", None)
