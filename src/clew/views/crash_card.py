"""How a run ended that did not say so itself: a crash, a kill, and stacks that a hang or a request left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clew.store.crash import read_crash
from clew.store.layout import rank_folder
from clew.views.block import Block, Callout, Text
from clew.views.number import format_integer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.query import Run

MOST_LINES: Final = 12
_MOST_NATIVE: Final = 8
_FATAL: Final = "Fatal Python error"
_NATIVE: Final = re.compile(r"^Native thread .*, the one that failed:\n((?:.+\n?)*)", re.MULTILINE)
_NEXT: Final = re.compile(
    r"^(?:Native stacks of process|native stacks|process \d+, started by)", re.MULTILINE
)
_FRAME: Final = re.compile(r"^(.*?)\((.*?)(\+0x[0-9a-f]+)?\)\s*\[0x[0-9a-f]+\]$")
_MANGLED_PART: Final = re.compile(r"(\d+)")


def tell_end(run: Run) -> list[Block]:
    """Say how far a process came that crashed or was killed, and show the stacks that were left."""
    texts = [(rank, read_crash(rank_folder(run.path, rank))) for rank in run.ranks]
    rank, crash = next(((rank, text) for rank, text in texts if text), (0, ""))
    is_silent = run.state == "died" and not run.info.ended
    if not crash:
        return [Callout("error", _say_killed(run))] if is_silent else []
    fatal = next((line for line in crash.splitlines() if line.startswith(_FATAL)), "")
    is_native = not fatal and "Native stacks of process" in crash
    place = f"less {rank_folder(run.path, rank) / 'crash.txt'}"
    if not fatal and not is_native:
        what = "stacks were written while it ran, at a hang or on request"
        return [Callout("warning", what, place), *_show(crash)]
    who = "the process" if is_silent else "a process that it had started, such as a loader's worker,"
    who = "a process of it" if run.state == "unknown" else who
    words = f"{who} crashed {_say_how_far(run)}" + (f": {fatal}" if fatal else "")
    return [Callout("error", words, place), *_show(crash.replace(fatal, "", 1)), *_show_native(crash)]


def _say_killed(run: Run) -> str:
    return (
        f"the process ended without a word {_say_how_far(run)}: it was killed (SIGKILL), or the machine ran out "
        "of memory or power"
    )


def _say_how_far(run: Run) -> str:
    """Return the last step on record; what is recorded is written once a second."""
    if not len(run.steps):
        return "before its first steps were written"
    return f"after step {format_integer(run.last_step)}"


def _show(crash: str) -> list[Block]:
    """Show the thread that failed or was asked, or else the main one, before the others."""
    first = _NEXT.split(crash, maxsplit=1)[0]
    threads = re.split(r"\n\s*\n", first.strip())
    main = next((text for text in threads if text.startswith("Current thread")), threads[-1])
    lines = [line for text in dict.fromkeys((main, *threads)) for line in text.splitlines()]
    shown = [line for line in lines if line.strip() and not line.startswith(("Extension modules", "Timeout"))]
    return [Text(f"  {line}", "quiet") for line in shown[:MOST_LINES]]


def _show_native(crash: str) -> list[Block]:
    """Show the innermost native frames of the thread that failed, up to where Python called them."""
    found = _NATIVE.search(crash)
    frames = list(_name_frames(found[1])) if found else []
    if not frames:
        return []
    return [Text("  native:", "quiet"), *(Text(f"    {frame}", "quiet") for frame in frames[:_MOST_NATIVE])]


def _name_frames(text: str) -> Iterator[str]:
    last = ""
    for line in text.splitlines():
        found = _FRAME.match(line)
        if found is None:
            continue
        file, name = Path(found[1]).name, _demangle(found[2])
        if name.startswith(("_Py", "Py")) or file.startswith("libpython"):
            return
        frame = f"{name} in {file}" if name else f"{file} {found[3] or ''}".rstrip()
        if frame != last:
            yield frame
        last = frame


def _demangle(name: str) -> str:
    """Return the names in a C++ symbol, without its arguments: ``at::native::relu``."""
    if not name.startswith("_ZN"):
        return name
    parts, rest = [], name[3:].lstrip("KVrRO")
    while (found := _MANGLED_PART.match(rest)) is not None:
        end = found.end() + int(found[1])
        parts.append(rest[found.end() : end])
        rest = rest[end:]
    return "::".join(parts) if parts else name
