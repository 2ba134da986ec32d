"""``clew ckpt``: look into checkpoints, compare two, scan many. Nothing in them is executed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from clew.errors import ClewError, UsageError, suggest

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from clew.cli.parser import Parser
    from clew.store.checkpoint import Checkpoint
    from clew.views.block import Page

ACTIONS: Final = ("show", "diff", "scan")
_VALUED: Final = ("--match", "--sort", "--depth", "--limit", "--fail-on")
SORTS: Final = ("file", "name", "size", "abs_max", "l2", "std", "mean", "zero", "nan")


def configure(parser: Parser) -> None:
    """Add the action, the files and the options."""
    parser.usage = (
        "clew ckpt show FILE [options]\n       clew ckpt diff A B [options]\n"
        "       clew ckpt scan FILE... [options]"
    )
    parser.add_argument("--match", metavar="GLOBS", default="", help="only these tensors: 'layers.*,!*.bias'")
    parser.add_argument(
        "--sort", metavar="KEY", default="file", help=f"show: order by {', '.join(SORTS)} (file)"
    )
    parser.add_argument("--depth", metavar="N", type=int, help="parts of a name that make a group")
    parser.add_argument(
        "--limit", metavar="N", type=int, help="rows at most, 0 for all (show: all, diff: 30)"
    )
    parser.add_argument(
        "--fail-on", metavar="LEVEL", default="warning", help="scan: exit with 1 from note, warning or error"
    )
    parser.add_argument("--trust", action="store_true", help="run the code that a pickled file contains")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = (
        "show lists every tensor with its statistics, diff what changed, scan what is\n"
        "wrong. Reads torch.save archives, safetensors (sharded too), npz, npy, and\n"
        "folders of transformers and torch.distributed.checkpoint.\n"
        "diff exits with 0 when all tensors are equal and with 1 when not;\n"
        "scan with 1 when something is wrong."
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options, and the action with its files: they may stand in any order."""
    options: list[str] = []
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return options, rest + waiting
        if not word.startswith("-"):
            rest.append(word)
            continue
        options.append(word)
        if word in _VALUED and waiting:
            options.append(waiting.pop(0))
    return options, rest


def execute(args: Namespace) -> int:
    """Do what was asked and return 0, or 1 for a difference or a flaw."""
    if not args.rest:
        raise UsageError("nothing to do", where="clew ckpt", next_step="clew ckpt show model.pt")
    args.action, *args.paths = args.rest
    if args.action not in ACTIONS:
        raise UsageError(
            f"'{args.action}' is not what clew ckpt does",
            next_step=suggest(args.action, ACTIONS) or f"clew ckpt show {args.action}",
        )
    if args.limit is not None and args.limit < 0:
        raise UsageError(f"'{args.limit}' is no number of rows", next_step="write --limit 100, or 0 for all")
    if args.depth is not None and args.depth < 1:
        raise UsageError(f"'{args.depth}' is no number of parts", next_step="write --depth 2")
    run = {"show": _show, "diff": _diff, "scan": _scan}[args.action]
    return run(args)


def _show(args: Namespace) -> int:
    from clew.compare.checkpoint import sort_summaries, summarise_checkpoint, total_groups
    from clew.views.checkpoint import make_show_page

    (path,) = _take_paths(args, 1)
    if args.sort not in SORTS:
        raise UsageError(
            f"cannot sort by '{args.sort}'",
            next_step=suggest(args.sort, SORTS) or f"use one of {', '.join(SORTS)}",
        )
    checkpoint = _open(path, args)
    with _bar("reading", checkpoint) as bar:
        summaries = summarise_checkpoint(checkpoint, _patterns(args), progress=bar.advance)
    groups = total_groups(summaries, args.depth)
    if args.sort != "file":
        summaries = sort_summaries(summaries, args.sort)
    if args.json:
        return _print_json(
            {
                "path": str(checkpoint.path),
                "format": checkpoint.format,
                "tensors": summaries,
                "groups": groups,
                "values": checkpoint.values,
                "notes": checkpoint.notes,
            }
        )
    return _print(make_show_page(checkpoint, summaries, groups, limit=args.limit or 0))


def _diff(args: Namespace) -> int:
    from clew.compare.checkpoint import diff_checkpoints
    from clew.views.checkpoint import make_diff_page

    paths = _take_paths(args, 2)
    a, b = (_open(path, args) for path in paths)
    with _bar("comparing", a, b) as bar:
        diff = diff_checkpoints(a, b, _patterns(args), depth=args.depth, progress=bar.advance)
    if args.json:
        from clew.render.json import to_plain

        _print_json({"same": diff.is_same, "a": str(a.path), "b": str(b.path)} | to_plain(diff))
    else:
        _print(make_diff_page(paths[0], paths[1], diff, limit=30 if args.limit is None else args.limit))
    return 0 if diff.is_same else 1


def _scan(args: Namespace) -> int:
    from clew.compare.checkpoint_scan import SEVERITIES, scan_checkpoint
    from clew.views.checkpoint import make_scan_page

    if args.fail_on not in SEVERITIES:
        raise UsageError(
            f"'{args.fail_on}' is no level", next_step=f"use --fail-on with one of {', '.join(SEVERITIES)}"
        )
    if not args.paths:
        raise UsageError("no file to scan", where="clew ckpt scan", next_step="clew ckpt scan model.pt")
    results, broken = [], []
    for path in args.paths:
        try:
            checkpoint = _open(path, args)
            with _bar("scanning", checkpoint) as bar:
                flaws = scan_checkpoint(checkpoint, _patterns(args), progress=bar.advance)
        except ClewError as error:
            # One unreadable file must not hide what is wrong with the others.
            broken.append(error)
            continue
        results.append((path, len(checkpoint.tensors), flaws))
    if args.json:
        _print_json(
            {
                "files": [{"path": path, "tensors": count, "flaws": found} for path, count, found in results],
                "unreadable": [{"path": failure.where, "reason": failure.what} for failure in broken],
            }
        )
    elif results:
        _print(make_scan_page(results))
    for failure in broken:
        print(f"clew: {failure}", file=sys.stderr)
    if broken:
        return max(failure.exit_code for failure in broken)
    fatal = SEVERITIES.index(args.fail_on)
    return int(any(SEVERITIES.index(flaw.severity) >= fatal for _, _, flaws in results for flaw in flaws))


def _take_paths(args: Namespace, count: int) -> list[str]:
    if len(args.paths) != count:
        files = "one file" if count == 1 else "two files"
        raise UsageError(
            f"clew ckpt {args.action} takes {files}, not {len(args.paths)}",
            next_step=f"clew ckpt {args.action} {' '.join(('A', 'B')[:count])}",
        )
    return list(args.paths)


def _open(path: str, args: Namespace) -> Checkpoint:
    from clew.api.checkpoint import open_checkpoint

    return open_checkpoint(path, trust=args.trust)


def _patterns(args: Namespace) -> tuple[str, ...]:
    from clew.model.glob import split_patterns

    return split_patterns(args.match)


def _bar(title: str, *checkpoints: Checkpoint) -> Any:
    from clew.render.progress import ByteBar

    return ByteBar(title, sum(checkpoint.size_bytes for checkpoint in checkpoints))


def _print(page: Page) -> int:
    from clew.render.terminal import show

    show(page)
    return 0


def _print_json(value: object) -> int:
    from clew.render.json import dump

    sys.stdout.write(dump(value))
    return 0
