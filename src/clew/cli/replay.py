"""``clew replay``: the time-travel debugger on a recorded step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clew.cli.choice import add_run, open_chosen
from clew.cli.commands import read_commands
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the run, the step, and where commands come from."""
    add_run(parser)
    parser.add_argument("--step", metavar="N", type=int, help="the step (the first bad one, else the last)")
    parser.add_argument("--rank", metavar="R", type=int, help="of this rank (the one that went bad first)")
    parser.add_argument(
        "--commands", metavar="FILE", help="execute these commands instead of asking; - is standard input"
    )
    parser.add_argument(
        "--json", action="store_true", help="print each reply as a line of JSON (with --commands)"
    )
    parser.add_argument("--full", action="store_true", help="full-screen view: source, operations and values")
    parser.add_argument(
        "--memory", metavar="SIZE", help="how much memory the values of the step may take (1GB)"
    )
    parser.add_argument("--ops", metavar="A:B", help="keep the values of these operations only")


def execute(args: Namespace) -> int:
    """Execute the step again and talk about it; exit 1 when it differs from the recording."""
    from clew.api.time_travel import travel

    run = open_chosen(args)
    done = travel(
        run,
        args.step,
        rank=args.rank,
        commands=_read_commands(args.commands, as_json=args.json),
        as_json=args.json,
        is_full=args.full,
        limit_bytes=_parse_memory(args.memory),
        window=_parse_window(args.ops),
    )
    return 1 if done.exactness == "diverged" else 0


def _read_commands(file: str | None, *, as_json: bool) -> tuple[str, ...] | None:
    if file is None:
        if as_json or not sys.stdin.isatty():
            raise UsageError(
                "there is no terminal to talk to" if not as_json else "--json needs commands",
                where="clew replay",
                next_step="give commands: clew replay RUN --commands FILE, or --commands - for standard input",
            )
        return None
    return read_commands(file)


def _parse_memory(text: str | None) -> int | None:
    if text is None:
        return None
    from clew.capture.settings import parse_bytes

    return parse_bytes(text) or sys.maxsize


def _parse_window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not (first.isdigit() or not first) or not (last.isdigit() or not last):
        raise UsageError(f"'{text}' is no range of operations", next_step="write 100:200, 100: or :50")
    return int(first or 0), int(last) if last else sys.maxsize
