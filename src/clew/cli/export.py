"""``clew export``: the rows of a run for other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.cli.choice import add_filters, add_run, open_chosen, parse_step, split_words, tell_problems
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator

    from clew.cli.parser import Parser
    from clew.query import Run, Table

FORMATS: Final = ("csv", "json", "parquet")
PIECE_ROWS: Final = 200_000


def configure(parser: Parser) -> None:
    """Add the run, the filters and where to write."""
    add_run(parser)
    parser.add_argument(
        "--to",
        metavar="FORMAT",
        choices=("csv", "json", "parquet", "tensorboard"),
        help="csv, json, parquet or tensorboard",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=_read_output,
        help="file to write, - or nothing for standard output; the folder for tensorboard",
    )
    parser.add_argument(
        "--table",
        metavar="TABLE",
        choices=("stats", "scalars"),
        default="stats",
        help="stats or scalars (stats)",
    )
    add_filters(parser)


def _read_output(text: str) -> Path | None:
    return None if text == "-" else Path(text)


def execute(args: Namespace) -> int:
    """Write the rows."""
    if args.to == "tensorboard":
        return _write_events(args)
    form = _choose_format(args)
    if args.table == "scalars" and (args.site or args.kind):
        raise UsageError("scalars have no site and no kind", next_step="leave --site and --kind out")
    run = open_chosen(args)
    steps = _choose_steps(run, parse_step(args.step))
    pieces = _scalar_pieces(run, args, steps) if args.table == "scalars" else _stat_pieces(run, args, steps)

    from clew.render.file import write

    write(_with_progress(pieces, len(steps)), form, args.output)
    tell_problems(run)
    if args.output is not None:
        ending = args.output.suffix.lstrip(".").lower()
        is_other = ending in FORMATS and ending != form
        words = f" as {form}, as --to says, though its name ends in .{ending}" if is_other else ""
        print(f"clew: wrote {args.output}{words}", file=sys.stderr)
    return 0


def _write_events(args: Namespace) -> int:
    from clew.api.tensorboard import write_run

    if args.output is None:
        raise UsageError("TensorBoard needs a folder", where="clew export", next_step="name it with -o DIR")
    run = open_chosen(args)
    steps = _choose_steps(run, parse_step(args.step))
    count = write_run(
        run, args.output, site=args.site, kind=split_words(args.kind), steps=steps, rank=args.rank
    )
    tell_problems(run)
    print(f"clew: wrote {count:,} values; next: tensorboard --logdir {args.output}", file=sys.stderr)
    return 0


def _choose_format(args: Namespace) -> str:
    form = args.to or (args.output.suffix.lstrip(".").lower() if args.output else "")
    if form not in FORMATS:
        raise UsageError(
            "no format was given", where="clew export", next_step="--to csv, --to json or --to parquet"
        )
    if form == "parquet" and args.output is None:
        raise UsageError("Parquet needs a file", where="clew export", next_step="name it with -o FILE")
    return str(form)


def _choose_steps(run: Run, wish: int | slice | str | None) -> list[int]:
    steps: list[int] = run.steps.tolist()
    if wish is None or not steps:
        return steps
    if wish == "latest":
        return steps[-1:]
    if isinstance(wish, int):
        return [step for step in steps if step == wish]
    assert isinstance(wish, slice)
    wanted = range(*wish.indices(steps[-1] + 1))
    return [step for step in steps if step in wanted]


def _stat_pieces(run: Run, args: Namespace, steps: list[int]) -> Iterator[tuple[Table, int]]:
    """Yield the statistics in pieces of whole steps that fit in memory, and how many steps each holds."""
    import numpy as np

    chosen = {"site": args.site, "kind": split_words(args.kind), "rank": args.rank}
    rows = len(run.stats(**chosen, step=steps[0], columns=["count"])) if steps else 0
    size = max(PIECE_ROWS // max(rows, 1), 1)
    for start in range(0, max(len(steps), 1), size):
        part = steps[start : start + size]
        window: Any = slice(part[0], part[-1] + 1) if part else slice(0, 0)
        table = run.stats(**chosen, step=window)
        yield table.take(np.isin(table["step"], part)), len(part)


def _scalar_pieces(run: Run, args: Namespace, steps: list[int]) -> Iterator[tuple[Table, int]]:
    """Yield the scalars of one rank after the other."""
    import numpy as np

    from clew.query import Table

    wanted = np.array(steps, np.int64)
    ranks = run.ranks if args.rank is None else [args.rank]
    for number, rank in enumerate(ranks):
        series = run.scalars(rank=rank)
        kept = {name: np.isin(each.steps, wanted) for name, each in series.items()}
        counts = [int(mask.sum()) for mask in kept.values()]
        empty = [np.zeros(0, np.int64)]
        columns = {
            "rank": np.full(sum(counts), rank, np.int32),
            "step": np.concatenate([*empty, *(series[name].steps[mask] for name, mask in kept.items())]),
            "name": np.repeat(np.arange(len(kept)), counts),
            "value": np.concatenate([*empty, *(series[name].values[mask] for name, mask in kept.items())]),
        }
        yield Table(columns, {"name": list(kept)}), len(steps) if number == len(ranks) - 1 else 0


def _with_progress(pieces: Iterable[tuple[Table, int]], total: int) -> Iterator[Table]:
    if not sys.stderr.isatty():
        yield from (piece for piece, _ in pieces)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("steps", total=total)
        for piece, steps in pieces:
            yield piece
            progress.advance(task, steps)
