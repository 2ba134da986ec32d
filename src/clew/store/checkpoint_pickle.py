"""A reader of pickles that runs nothing: no import, no call of anything the file names.

A pickle is a small program. This one executes only the instructions that build plain containers, and answers
each global name from a table of its caller. A name outside the table is refused by name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from clew.errors import CheckpointBroken, CheckpointUntrusted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Maker = Callable[..., Any]

_MARK: Final = object()
_KEY_TYPES: Final = (str, int, float, bytes, type(None))
DAMAGE: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What reading nonsense as if it were sense can raise."""
_MAX_INSTRUCTIONS: Final = 20_000_000
"""A hundred thousand tensors take six million; without a limit a small file could fill the memory."""

TRUST_STEP: Final = "if you know where it comes from, add --trust: it then runs the code in the file"


@dataclass(eq=False, slots=True)
class Record:
    """An object that a pickle describes and clew never makes: its type, arguments and state."""

    type: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def field(self, name: str, default: Any = None) -> Any:
        """Return one attribute of the described object."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """A name that a pickle mentions, with what clew does when the pickle calls it."""

    name: str
    make: Maker


def keep(name: str) -> Maker:
    """Return a maker that keeps the arguments of a call and does nothing."""
    return lambda *args: Record(name, args)


def interpret(
    data: bytes, makers: Mapping[str, Maker], *, where: str, load_storage: Maker | None = None
) -> Any:
    """Return the tree that a pickle describes, or refuse it.

    ``makers`` maps ``module.name`` to the function that stands in for it. ``load_storage`` answers the
    references to storages outside the pickle.
    """
    machine = _Machine(data, makers, where, load_storage)
    try:
        return machine.run()
    except (CheckpointBroken, CheckpointUntrusted) as error:
        error.where = error.where or where
        raise
    except DAMAGE as error:
        raise CheckpointBroken(
            f"the pickle inside is damaged near byte {machine.at:,} ({type(error).__name__})",
            where=where,
            next_step="copy, download or save it again",
        ) from None


class _Machine:
    """The stack, the memo and the place in the program."""

    def __init__(
        self, data: bytes, makers: Mapping[str, Maker], where: str, load_storage: Maker | None
    ) -> None:
        self.data = data
        self.at = 0
        self.makers = makers
        self.where = where
        self.load_storage = load_storage
        self.stack: list[Any] = []
        # A table, not an array as in the standard library: an index of four billion costs one entry.
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute until STOP."""
        for _ in range(_MAX_INSTRUCTIONS):
            code = self.data[self.at]
            self.at += 1
            if code == _STOP:
                return self.finish()
            action = _ACTIONS.get(code)
            if action is None:
                raise CheckpointUntrusted(
                    f"the pickle uses instruction {bytes([code])!r}, which clew does not execute",
                    where=self.where,
                    next_step=TRUST_STEP,
                )
            action(self)
        raise CheckpointBroken(f"its pickle has over {_MAX_INSTRUCTIONS:,} instructions", where=self.where)

    def finish(self) -> Any:
        """Return the one thing that a sound program leaves on the stack."""
        (result,) = self.stack
        if result is _MARK:
            raise ValueError
        return result

    def take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        end = self.at + count
        if end > len(self.data):
            raise IndexError
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def number(self, form: str) -> Any:
        """Return a number of the program, by its struct format."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        """Return the text up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def pop_to_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and drop the mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def resolve(self, module: str, name: str) -> Global:
        """Return the stand-in for a global, or refuse it."""
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        make = self.makers.get(full)
        if make is None:
            raise CheckpointUntrusted(
                f"reading it would import and run '{full}', which is not plain tensor data",
                where=self.where,
                next_step=TRUST_STEP,
            )
        return Global(full, make)

    def call(self, target: Any, args: Any) -> None:
        """Push what a stand-in makes of its arguments."""
        if not isinstance(target, Global) or not isinstance(args, tuple):
            raise TypeError
        self.stack.append(target.make(*args))


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _text(form: str) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: str) -> Callable[[_Machine], None]:
    return _push(lambda machine: machine.take(machine.number(form)))


def _long(form: str) -> Callable[[_Machine], None]:
    return _push(lambda machine: int.from_bytes(machine.take(machine.number(form)), "little", signed=True))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def action(machine: _Machine) -> None:
        if len(machine.stack) < count:
            raise IndexError
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return action


def set_pairs(target: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Put pairs into a dictionary, if it is one and the keys are plain."""
    if not isinstance(target, dict):
        raise TypeError
    for key, value in pairs:
        if not _is_plain_key(key):
            raise TypeError
        target[key] = value


def _is_plain_key(key: Any) -> bool:
    """Whether hashing is safe: a tuple nested a million deep would exhaust the stack of the process."""
    if isinstance(key, tuple):
        return all(isinstance(each, _KEY_TYPES) for each in key)
    return isinstance(key, (*_KEY_TYPES, Record, Global))


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    _extend(machine.stack[-1], items)


def _extend(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    else:
        raise TypeError


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    set_pairs(machine.stack[-1], [(key, value)])


def _many_set_items(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    set_pairs(machine.stack[-1], zip(items[::2], items[1::2], strict=True))


def _make_dict(machine: _Machine) -> None:
    items = machine.pop_to_mark()
    table: dict[Any, Any] = {}
    set_pairs(table, zip(items[::2], items[1::2], strict=True))
    machine.stack.append(table)


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise TypeError
    machine.stack.append(machine.resolve(module, name))


def _reduce(machine: _Machine) -> None:
    args, target = machine.stack.pop(), machine.stack.pop()
    machine.call(target, args)


def _new_object_with_keywords(machine: _Machine) -> None:
    keywords, args, target = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if keywords:
        raise TypeError
    machine.call(target, args)


def _build(machine: _Machine) -> None:
    """Give an object its state. A dictionary's own attributes (torch's ``_metadata``) are of no interest."""
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Record):
        target.state = state
    elif not isinstance(target, dict):
        raise TypeError


def _persistent(machine: _Machine) -> None:
    if machine.load_storage is None:
        raise TypeError
    machine.stack.append(machine.load_storage(machine.stack.pop()))


_STOP: Final = ord(".")
_ACTIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    ord(code): action
    for code, action in {
        "\x80": lambda machine: machine.take(1),
        "\x95": lambda machine: machine.take(8),
        "(": _push(lambda _: _MARK),
        "0": lambda machine: machine.stack.pop(),
        "1": lambda machine: machine.pop_to_mark(),
        "2": _push(lambda machine: machine.stack[-1]),
        "N": _push(lambda _: None),
        "\x88": _push(lambda _: True),
        "\x89": _push(lambda _: False),
        "J": _push(lambda machine: machine.number("<i")),
        "K": _push(lambda machine: machine.number("<B")),
        "M": _push(lambda machine: machine.number("<H")),
        "\x8a": _long("<B"),
        "\x8b": _long("<I"),
        "G": _push(lambda machine: machine.number(">d")),
        "X": _text("<I"),
        "\x8c": _text("<B"),
        "\x8d": _text("<Q"),
        "B": _bytes("<I"),
        "C": _bytes("<B"),
        "\x8e": _bytes("<Q"),
        "\x96": _bytes("<Q"),
        "T": _text("<I"),
        "U": _text("<B"),
        "]": _push(lambda _: []),
        "}": _push(lambda _: {}),
        ")": _push(lambda _: ()),
        "\x8f": _push(lambda _: []),
        "\x91": _push(lambda machine: machine.pop_to_mark()),
        "l": _push(lambda machine: machine.pop_to_mark()),
        "d": _make_dict,
        "t": _push(lambda machine: tuple(machine.pop_to_mark())),
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "a": _append,
        "e": _appends,
        "s": _set_item,
        "u": _many_set_items,
        "\x90": _appends,
        "q": lambda machine: _put(machine, machine.number("<B")),
        "r": lambda machine: _put(machine, machine.number("<I")),
        "\x94": lambda machine: _put(machine, len(machine.memo)),
        "h": _push(lambda machine: machine.memo[machine.number("<B")]),
        "j": _push(lambda machine: machine.memo[machine.number("<I")]),
        "c": _push(lambda machine: machine.resolve(machine.line(), machine.line())),
        "\x93": _stack_global,
        "R": _reduce,
        "\x81": _reduce,
        "\x92": _new_object_with_keywords,
        "b": _build,
        "Q": _persistent,
    }.items()
}
"""What each instruction does; those absent (text numbers of protocol 0, extension codes) are refused. Sets
are kept as lists: their elements are shown, never looked up."""
