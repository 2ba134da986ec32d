"""Arguments that several commands share: which run, and which of its rows."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser
    from clew.query import Run

RUN_HELP = "path, name, beginning of a name, or latest"


def add_root(parser: Parser) -> None:
    """Add the folder in which names of runs are looked up."""
    parser.add_argument(
        "--root", metavar="DIR", help="folder that holds the runs (the setting 'out', or runs)"
    )


def add_run(parser: Parser) -> None:
    """Add one run, the latest unless named."""
    parser.add_argument("run", metavar="RUN", nargs="?", default="latest", help=RUN_HELP + " (latest)")
    add_root(parser)


def add_filters(parser: Parser) -> None:
    """Add the filters on rows: site, kind, step and rank."""
    parser.add_argument("--site", metavar="GLOB", help="sites whose name fits, such as 'layers.*'")
    parser.add_argument("--kind", metavar="KIND", help="kinds, such as grad or output,grad_output")
    parser.add_argument(
        "--step", metavar="A:B", help="steps from A up to but not including B; A: :B A A:B:STRIDE"
    )
    parser.add_argument("--rank", metavar="R", type=int, help="only this rank")


def find_root(args: Namespace) -> str:
    """Return the folder that holds the runs: as asked, else where ``clew run`` would put a new one."""
    if args.root is not None:
        return str(args.root)
    from clew.capture.settings import load_settings

    return load_settings().out


def open_chosen(args: Namespace) -> Run:
    """Open the run that was named."""
    from clew.api.read import open_run

    return open_run(args.run, root=find_root(args))


def tell_problems(run: Run) -> None:
    """Say on standard error what of a run could not be read, for commands whose output has no place for it."""
    for problem in run.problems:
        print(f"clew: {run.name}: {problem}", file=sys.stderr)


def split_words(text: str | None) -> list[str] | None:
    """Return the words of ``a,b``, or None when nothing was given."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def parse_step(text: str | None) -> int | slice | str | None:
    """Return a step, a slice of steps or ``latest`` from what was typed."""
    if text is None or text == "latest":
        return text
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"\d*:\d*(:[1-9]\d*)?", text):
        steps = slice(*(int(part) if part else None for part in text.split(":")))
        if steps.stop is not None and steps.stop <= (steps.start or 0):
            raise UsageError(
                f"there is no step in '{text}': it ends at step {steps.stop}, which is left out, and begins at "
                f"step {steps.start or 0}",
                next_step="write the earlier step first: 2:5 are the steps 2, 3 and 4",
            )
        return steps
    raise UsageError(f"'{text}' is no range of steps", next_step="write 12, 100:200, 100:, :50 or latest")
