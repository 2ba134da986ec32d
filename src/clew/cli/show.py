"""``clew show``: one page about a run, or a table of the statistics that were asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clew.cli.choice import add_filters, add_run, open_chosen, parse_step, split_words, tell_problems
from clew.cli.kept import make_kept_page
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser
    from clew.query import Run
    from clew.views.block import Page


def configure(parser: Parser) -> None:
    """Add the run, the filters and how to print."""
    add_run(parser)
    add_filters(parser)
    parser.add_argument("--stat", metavar="NAMES", help="only these statistics, such as l2 or mean,std")
    parser.add_argument(
        "--limit", metavar="N", type=int, default=50, help="rows of the table at most, 0 for all (50)"
    )
    parser.add_argument(
        "--exception", action="store_true", help="the exception that ended the run, with its values"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "Any of --site, --kind, --step, --rank and --stat turns the page into a table."


def execute(args: Namespace) -> int:
    """Print the page or the table."""
    if args.limit < 0:
        raise UsageError(f"'{args.limit}' is no number of rows", next_step="write --limit 100, or 0 for all")
    run = open_chosen(args)
    page = _choose_page(args, run)
    if args.json:
        from clew.render.json import lower

        sys.stdout.write(lower(page))
        return 0
    from clew.render.terminal import show

    show(page)
    return 0


def _choose_page(args: Namespace, run: Run) -> Page:
    if args.exception:
        return _exception_page(run, args.rank)
    if all(value is None for value in (args.site, args.kind, args.step, args.rank, args.stat)):
        from clew.views.run_page import make_page

        return make_page(run)
    from clew.views import site_table

    tell_problems(run)
    return site_table.make_page(
        run,
        site=args.site,
        kind=split_words(args.kind),
        step=parse_step(args.step),
        rank=args.rank,
        stats=split_words(args.stat),
        limit=args.limit,
    )


def _exception_page(run: Run, rank: int | None) -> Page:
    from clew.store.exception import read_exception
    from clew.store.layout import rank_folder
    from clew.views.exception_page import make_page

    wanted = run.ranks if rank is None else [rank]
    cards = (read_exception(rank_folder(run.path, each)) for each in wanted)
    card = next((card for card in cards if card is not None), None)
    if card is None:
        raise UsageError(
            "no exception of torch ended this run", where=str(run.path), next_step=f"clew show {run.name}"
        )
    return make_kept_page(
        make_page, card, run, name="what was kept of the exception", next_step=f"clew show {run.name}"
    )
