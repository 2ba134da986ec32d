"""``clew diff``: whether two runs are the same, and if not, where and why they part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clew.cli.choice import RUN_HELP, add_root, find_root
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser
    from clew.compare.diff import Diff


def configure(parser: Parser) -> None:
    """Add the two runs, the map, the baseline and how to print."""
    parser.usage = (
        "clew diff RUN_A RUN_B [options]\n"
        "       clew diff --compiled SCRIPT.py:MAKE_MODEL,MAKE_BATCH [options]"
    )
    parser.add_argument("a", metavar="RUN_A", nargs="?", help=RUN_HELP)
    parser.add_argument("b", metavar="RUN_B", nargs="?", help="the same")
    add_root(parser)
    parser.add_argument(
        "--map", metavar="FILE", help="TOML file with a table [names]: sites of A to sites of B"
    )
    parser.add_argument(
        "--save-map", metavar="FILE", help="write the names that were found to belong together"
    )
    parser.add_argument(
        "--baseline",
        metavar="RUN",
        nargs=2,
        help="two runs that should be equal: their noise is no difference",
    )
    parser.add_argument(
        "--compiled",
        metavar="TARGET",
        help="compare a model with itself compiled: script.py:make_model,make_batch",
    )
    parser.add_argument(
        "--way",
        default="compile",
        help="with --compiled, another way than compile: bfloat16, float16, float64, cuda, mps, threads=4",
    )
    parser.add_argument("--backend", default="inductor", help="the compiler's backend (inductor)")
    parser.add_argument(
        "--isolate",
        action="store_true",
        help="with --compiled, give each module the reference's inputs: it is judged alone; with runs, as --rerun",
    )
    parser.add_argument(
        "--rerun",
        action="store_true",
        help="execute the step in which the runs part again, by both scripts, and name the first operation",
    )
    add_output(parser)
    parser.epilog = "Exit code: 0 the same, 1 different."


def add_output(parser: Parser) -> None:
    """Add how a comparison is printed."""
    parser.add_argument(
        "--limit", metavar="N", type=int, default=20, help="rows of the table at most, 0 for all (20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write the page as one HTML file")


def execute(args: Namespace) -> int:
    """Compare, print and return 0 for the same, 1 for different."""
    from clew.api.compare import diff

    check_output(args)
    if args.compiled:
        return _compare_variant(args)
    if args.a is None or args.b is None:
        raise UsageError(
            "two runs are needed",
            where="clew diff",
            next_step="clew diff runs/first runs/second; clew ls lists them",
        )
    found = diff(
        args.a,
        args.b,
        names=args.map,
        baseline=args.baseline,
        root=find_root(args),
        rerun=args.rerun or args.isolate,
    )
    if args.save_map:
        from clew.compare.align_map import format_map

        _write(args.save_map, format_map(found.alignment))
    print_diff(found, args, a=args.a, b=args.b)
    return 0 if found.is_same else 1


def _compare_variant(args: Namespace) -> int:
    from clew.api.variant import diff_variant
    from clew.cli.model_argument import load_pair

    if args.a is not None:
        raise UsageError("--compiled takes no run", where="clew diff", next_step="clew diff --help")
    model, batch = load_pair(args.compiled)
    found = diff_variant(model, batch, way=args.way, backend=args.backend, isolate=args.isolate)
    print_diff(found, args, a="eager", b=args.way)
    return 0 if found.is_same else 1


def check_output(args: Namespace) -> None:
    """Raise when the number of rows is none."""
    if args.limit < 0:
        raise UsageError(f"'{args.limit}' is no number of rows", next_step="write --limit 100, or 0 for all")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the file: {error.strerror}", where=path, next_step="choose another path"
        ) from None


def print_diff(found: Diff, args: Namespace, *, a: str, b: str) -> None:
    """Print a comparison as it was asked for."""
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump(found.to_json()))
        return
    from clew.views.diff_page import make_page

    page = make_page(found, a=a, b=b, limit=args.limit)
    if args.html:
        from clew.render.html import lower_file

        _write(args.html, lower_file(page))
    from clew.render.terminal import show

    show(page)
