"""``clew determinism``: the same script twice; identical, or where not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clew.cli.diff import add_output, check_output, print_diff
from clew.cli.script_words import split_at_script
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from clew.cli.parser import Parser

_SWITCHES: Final = ("--json", "-h", "--help")
"""Options without a value; every other one takes the next word."""


def configure(parser: Parser) -> None:
    """Add where the runs are kept and how to print."""
    parser.usage = "clew determinism [options] SCRIPT ...\n       clew determinism [options] -m MODULE ..."
    parser.add_argument("--keep", metavar="DIR", help="keep the two runs in this folder")
    add_output(parser)
    parser.epilog = (
        "The script runs twice with every step recorded; what it prints is not shown.\n"
        "Everything after the script belongs to it.\n"
        "Exit code: 0 identical, or equal but for rounding; 1 different."
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return clew's own words, and those of the script."""
    return split_at_script(words, switches=_SWITCHES)


def execute(args: Namespace) -> int:
    """Run twice, compare, print and return 0 for the same, 1 for different."""
    if not args.rest or args.rest == ["-m"]:
        raise UsageError("no script to run", where="clew determinism", next_step="clew determinism train.py")
    check_output(args)
    if args.rest[0] != "-m" and not Path(args.rest[0]).exists():
        raise UsageError(
            f"no script '{args.rest[0]}'",
            where=str(Path.cwd()),
            next_step="check the path, or use -m for a module",
        )
    if args.keep:
        folder = Path(args.keep)
        if any((folder / name).exists() for name in ("first", "second")):
            raise UsageError(
                "there are runs in this folder already",
                where=str(folder),
                next_step="name another with --keep",
            )
        return _compare(args, folder)
    with tempfile.TemporaryDirectory(prefix="clew-") as temporary:
        return _compare(args, Path(temporary))


def _compare(args: Namespace, folder: Path) -> int:
    from clew.api.compare import diff, run_twice

    found = diff(*run_twice(args.rest, folder))
    print_diff(found, args, a="first", b="second")
    return 0 if found.is_same else 1
