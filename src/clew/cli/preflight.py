"""``clew preflight``: one short rehearsal of a training script before a long run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from clew.cli.script_words import split_at_script
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from clew.cli.parser import Parser

_SWITCHES: Final = ("--json", "-h", "--help")
"""Options without a value; every other one takes the next word."""


def configure(parser: Parser) -> None:
    """Add which checks to make and how to print."""
    parser.usage = "clew preflight [options] SCRIPT ...\n       clew preflight [options] -m MODULE ..."
    parser.add_argument("--only", metavar="NAMES", action="append", default=[], help="make these checks only")
    parser.add_argument(
        "--skip", metavar="NAMES", action="append", default=[], help="leave checks out: compile"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = (
        "The script runs for a few steps and is stopped; it prints to standard error.\n"
        "Everything after the script or module belongs to it, options too.\n"
        "Exit code: 0 when no check failed, 2 otherwise."
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return clew's own words, and those of the script."""
    return split_at_script(words, switches=_SWITCHES)


def execute(args: Namespace) -> int:
    """Rehearse the script and print what was found."""
    is_module = args.rest[:1] == ["-m"]
    words = args.rest[1:] if is_module else args.rest
    if not words:
        raise UsageError("no script to rehearse", where="clew preflight", next_step="clew preflight train.py")

    from clew.api.preflight_script import preflight_script

    report = preflight_script(
        words[0], words[1:], module=is_module, only=args.only, skip=args.skip, on_check=_tell_progress
    )
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump(report.to_json()))
    else:
        from clew.render.terminal import show
        from clew.views.preflight_page import make_page

        show(make_page(report, name=words[0]))
    return report.exit_code


def _tell_progress(name: str, position: int, count: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kclew: preflight {position + 1}/{count} {name}")
        sys.stderr.flush()
