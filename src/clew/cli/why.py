"""``clew why``: the operation and the line that made the first NaN or infinity of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from clew.cli.choice import add_run, open_chosen
from clew.cli.kept import make_kept_page

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser
    from clew.query.run import Run
    from clew.views.block import Page


def configure(parser: Parser) -> None:
    """Add the run, the step and how to print."""
    add_run(parser)
    parser.add_argument(
        "--step", metavar="N", type=int, help="explain this step instead of the first bad one"
    )
    parser.add_argument("--rank", metavar="R", type=int, help="of this rank (the one that went bad first)")
    parser.add_argument(
        "--rerun", action="store_true", help="run the script again even if a verdict is there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: Namespace) -> int:
    """Print the verdict; exit 1 when no cause was found."""
    from clew.api.why import why

    run = open_chosen(args)
    verdict = why(run, step=args.step, rank=args.rank, rerun=args.rerun)
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump(verdict))
    else:
        from clew.render.terminal import show

        show(_make_page(verdict, run))
    return 0 if verdict["found"] else 1


def _make_page(verdict: dict[str, Any], run: Run) -> Page:
    from clew.views.why_page import make_page

    return make_kept_page(
        make_page,
        verdict,
        run,
        name="the verdict that was kept",
        next_step=f"clew why {run.name} --rerun",
    )
