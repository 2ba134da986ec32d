"""``clew ls``: the runs, newest first."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clew.cli.choice import add_root, find_root

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add where to look and how to print."""
    add_root(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def execute(args: Namespace) -> int:
    """Print the list."""
    from clew.api.read import list_runs
    from clew.views.run_list import make_page

    root = find_root(args)
    runs = list_runs(root)
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump(runs))
        return 0
    from clew.render.terminal import show

    show(make_page(runs, root=root))
    return 0
