"""Plain data out of JSON: a field of the wrong type is found on reading, not when somebody draws it."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")

_known: dict[type[Any], dict[str, tuple[tuple[type, ...], tuple[type, ...], bool]]] = {}


def make(kind: type[Made], content: object) -> Made:
    """Return a dataclass made of a JSON object; raises TypeError for what does not fit, unknown keys are passed over.

    Lists become tuples where the dataclass has tuples.
    """
    if not isinstance(content, dict):
        raise TypeError(f"a {kind.__name__} is no {type(content).__name__}")
    given: dict[str, Any] = {}
    for name, (accepted, parts, is_tuple) in _fields_of(kind).items():
        if name not in content:
            continue
        value = content[name]
        if is_tuple and isinstance(value, list):
            value = tuple(value)
        if type(value) not in accepted or (parts and not _have(value, parts)):
            raise TypeError(f"{name} is {_shorten(value)}")
        given[name] = value
    return kind(**given)


def _have(value: Any, parts: tuple[type, ...]) -> bool:
    """Return whether the members of a list, or the values of a dict, have one of these types."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return all(type(member) in parts for member in members)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _fields_of(kind: type[Any]) -> dict[str, tuple[tuple[type, ...], tuple[type, ...], bool]]:
    """Return for each field the types it takes, those of its members, and whether it is a tuple."""
    if kind not in _known:
        hints = get_type_hints(kind)
        _known[kind] = {item.name: _read_hint(hints[item.name]) for item in fields(kind)}
    return _known[kind]


def _read_hint(hint: Any) -> tuple[tuple[type, ...], tuple[type, ...], bool]:
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    accepted: list[type] = []
    parts: list[type] = []
    for choice in choices:
        plain = get_origin(choice) or choice
        accepted += [plain, int] if plain is float else [plain]
        members = get_args(choice)[-1:] if plain in (list, dict) else get_args(choice)[:1]
        parts += [member for member in members if member is not Any]
    return tuple(accepted), tuple(parts), tuple in accepted
