"""``clew plot``: numbers of one or several runs as lines, on the terminal or in a picture."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clew.cli.choice import RUN_HELP, add_root, find_root
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the runs, what to draw of them, the axes and where to."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help=f"{RUN_HELP} (latest); several share the picture"
    )
    parser.add_argument(
        "--scalar",
        metavar="NAME",
        action="append",
        default=[],
        help="a recorded number, such as loss, 'time.*' or time for the seconds of a step; once for each (loss)",
    )
    parser.add_argument("--site", metavar="GLOB", help="draw a statistic of these sites instead")
    parser.add_argument(
        "--kind", metavar="KIND", default="output", help="of the sites: what was measured (output)"
    )
    parser.add_argument("--stat", metavar="NAME", default="l2", help="of the sites: the statistic (l2)")
    parser.add_argument("--mean", metavar="N", type=int, default=1, help="mean of so many values each (1)")
    parser.add_argument("-x", metavar="UNIT", default="step", help="axis: step, s, min or h (step)")
    parser.add_argument("--log", action="store_true", help="logarithmic values (when they span two decades)")
    parser.add_argument("--linear", action="store_true", help="never logarithmic")
    parser.add_argument(
        "--x-range", metavar="A:B", help="from A to B on the axis; A: and :B leave an end open"
    )
    parser.add_argument("--y-range", metavar="A:B", help="values from A to B")
    parser.add_argument("--title", metavar="TEXT", default="", help="what stands above")
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="the rank (0)")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="where to: .svg or .png (the terminal)"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers of the lines")
    add_root(parser)


def execute(args: Namespace) -> int:
    """Draw, and say where the picture is."""
    from clew.api.plot import plot
    from clew.render.json import dump

    if args.log and args.linear:
        raise UsageError("both --log and --linear", next_step="give one of them")
    chart = plot(
        *args.runs,
        scalar=args.scalar,
        site=args.site,
        kind=args.kind,
        stat=args.stat,
        mean=args.mean,
        x=args.x,
        log=True if args.log else False if args.linear else None,
        title=args.title,
        x_range=_parse_range(args.x_range, "--x-range"),
        y_range=_parse_range(args.y_range, "--y-range"),
        rank=args.rank,
        root=find_root(args),
    )
    if args.output is not None:
        print(f"{chart.save(args.output)}: {len(chart.lines)} lines", file=sys.stderr)
    if args.json:
        sys.stdout.write(dump(chart.to_dict()))
    elif args.output is None:
        chart.show()
    return 0


def _parse_range(text: str | None, option: str) -> tuple[float | None, float | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"([^:]*):([^:]*)", text)
    try:
        low, high = (float(part) if part else None for part in match.groups()) if match else (1.0, 0.0)
    except ValueError:
        low, high = 1.0, 0.0
    if low is not None and high is not None and not low < high:
        raise UsageError(f"'{text}' is no range", where=option, next_step="write it like 0:100, 10: or :0.5")
    return low, high
