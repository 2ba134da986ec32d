"""``clew rm``: deletes runs, after asking."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from clew.cli.choice import RUN_HELP, add_root, find_root
from clew.errors import ClewError, RunNotFound, UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from clew.api.read import RunSummary
    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the runs and the answer to the question."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)
    add_root(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def execute(args: Namespace) -> int:
    """Delete the runs; nothing is deleted unless every name is a run that has ended."""
    chosen = _find(args)
    if not args.yes and not _is_confirmed(chosen):
        print("clew: nothing was deleted", file=sys.stderr)
        return 1
    for path in chosen:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise ClewError(f"the run could not be deleted: {error.strerror}", where=str(path)) from error
        print(f"deleted {path}")
    return 0


def _find(args: Namespace) -> dict[Path, RunSummary]:
    from clew.api.read import find_run, list_runs

    root = find_root(args)
    found: dict[Path, RunSummary] = {}
    for name in args.runs:
        path = find_run(name, root=root)
        listed = {run.path.resolve(): run for run in list_runs(path.parent)}
        run = listed.get(path.resolve())
        # A path may lead anywhere: only what is a run of clew is ever deleted.
        if run is None:
            raise RunNotFound(
                "there is no run in this folder", where=str(path), next_step="`clew ls` lists the runs"
            )
        if run.state == "recording":
            raise UsageError(
                f"{run.name} is still being recorded", where=str(path), next_step="stop the training first"
            )
        found[path] = run
    return found


def _is_confirmed(chosen: dict[Path, RunSummary]) -> bool:
    from clew.views.number import format_bytes

    for path, run in chosen.items():
        print(f"{path}  {run.steps} steps, {format_bytes(run.size_bytes)}", file=sys.stderr)
    if not sys.stdin.isatty():
        raise UsageError("there is nobody to ask", next_step="--yes deletes without asking")
    question = "delete this run? [y/N] " if len(chosen) == 1 else f"delete these {len(chosen)} runs? [y/N] "
    return input(question).strip().lower() in ("y", "yes")
