"""``clew repro``: a standalone test that fails until a recorded fault is mended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clew.cli.choice import add_run, open_chosen

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the run, the step and where to write."""
    add_run(parser)
    parser.add_argument(
        "--step", metavar="N", type=int, help="the step to make a test of (the first bad one)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="test_nan.py", help="the test (test_nan.py)"
    )
    parser.add_argument("--site", metavar="NAME", default="", help="test this module, if it fails by itself")
    parser.add_argument(
        "--operation", action="store_true", help="test the single operation, not the module around it"
    )


def execute(args: Namespace) -> int:
    """Write the test and say what it holds."""
    from clew.api.repro import write_repro

    made = write_repro(
        open_chosen(args), Path(args.output), step=args.step, operation=args.operation, site=args.site
    )
    print(f"wrote {made.test} and {made.data}: a test of the {made.part}, which fails now")
    print(f"the data: {made.holds}; think before you hand it on", file=sys.stderr)
    for reason in made.reasons:
        print(f"not possible: {reason}", file=sys.stderr)
    return 0
