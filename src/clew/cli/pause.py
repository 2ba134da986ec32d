"""``clew pause``: stop a training that is going on, from another terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.cli.choice import add_run, open_chosen

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the run and whether to go on."""
    add_run(parser)
    parser.add_argument("--off", action="store_true", help="let the training go on")
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="which process of the training (0)")


def execute(args: Namespace) -> int:
    """Ask the training to stop at its next model call, or to go on."""
    from clew.api.attach import ask

    ask(open_chosen(args), "resume" if args.off else "pause", rank=args.rank, tell=print)
    return 0
