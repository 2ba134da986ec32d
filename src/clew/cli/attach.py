"""``clew attach``: stop a training that is going on, look around in it, and let it go on."""

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
    """Add the run and where commands come from."""
    add_run(parser)
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="which process of the training (0)")
    parser.add_argument(
        "--commands", metavar="FILE", help="execute these commands instead of asking; - is standard input"
    )
    parser.add_argument(
        "--json", action="store_true", help="print each reply as a line of JSON (with --commands)"
    )


def execute(args: Namespace) -> int:
    """Talk to the training; leaving lets it go on."""
    from clew.api.attach import attach

    if args.commands is None and (args.json or not sys.stdin.isatty()):
        raise UsageError(
            "there is no terminal to talk to",
            where="clew attach",
            next_step="give commands: clew attach RUN --commands FILE, or --commands - for standard input",
        )
    attach(
        open_chosen(args),
        rank=args.rank,
        commands=read_commands(args.commands),
        as_json=args.json,
        output=sys.stdout,
        tell=lambda text: print(f"clew: {text}", file=sys.stderr),
    )
    return 0
