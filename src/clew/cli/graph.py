"""``clew graph``: the picture of a model, of a recorded run, of an exported program or of a saved graph."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from clew.cli.choice import add_root, find_root
from clew.cli.model_argument import add_model, load_model
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser
    from clew.model.graph import Graph


def configure(parser: Parser) -> None:
    """Add what to draw, how, and where to."""
    add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to: .svg .png .html .dot .mermaid or .json (opens a page)",
    )
    parser.add_argument(
        "--depth", metavar="N", type=int, help="levels of modules to open (as many as are readable)"
    )
    parser.add_argument("--color", metavar="WHAT", help="op, health, or a statistic such as std (op)")
    parser.add_argument("--verbose", action="store_true", help="show arguments and what needs a gradient")
    parser.add_argument(
        "--trust", action="store_true", help="load an exported program, which may run code in it"
    )
    parser.add_argument("--step", metavar="N", help="of a run: the step (the latest)")
    parser.add_argument("--kind", metavar="KIND", help="of a run: what was measured, such as grad (output)")
    parser.add_argument("--stat", metavar="NAME", help="of a run: the statistic to colour by (l2)")
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="of a run: the rank (0)")
    add_root(parser)
    parser.epilog = "MODEL may also be a run (path, name or latest) or a graph saved as .json."


def execute(args: Namespace) -> int:
    """Draw into a file, or show a page."""
    from clew.api import picture

    _check(args)
    if args.output is not None:
        picture.choose_format(Path(args.output))
    graph, color = _find_graph(args)
    options = {"color": args.color or color, "verbose": args.verbose, "depth": args.depth}
    if args.output is None:
        picture.view(graph, **options)
        return 0
    path = picture.save(graph, args.output, **options)
    print(f"{path}: {len(graph.operations)} operations")
    return 0


def _check(args: Namespace) -> None:
    """Refuse options that what is drawn does not have, rather than ignoring them."""
    if args.model.endswith(".py"):
        raise UsageError(
            "a script alone names no model",
            where=args.model,
            next_step=f"write it like {args.model}:make_model",
        )
    for name in ("step", "kind", "stat"):
        if getattr(args, name) is not None and _is_model(args.model):
            raise UsageError(
                f"--{name} belongs to a recorded run", where=args.model, next_step="leave it out"
            )
    if args.input and not _is_model(args.model):
        raise UsageError("--input belongs to a model", where=args.model, next_step="leave it out")
    if args.color is not None and args.stat is not None:
        raise UsageError("both --color and --stat say what to colour by", next_step="give one of them")


def _is_model(text: str) -> bool:
    """Return whether a word names a model in Python code: a script or a module, a colon and a name."""
    return re.search(r"(\.py|^[A-Za-z_][\w.]*):[A-Za-z_]", text) is not None


def _find_graph(args: Namespace) -> tuple[Graph, str]:
    """Return the graph, and what to colour it by unless that was said."""
    if args.model.endswith(".json"):
        return _read_graph(Path(args.model)), "op"
    if args.model.endswith(".pt2") and not args.trust:
        raise UsageError(
            "an exported program can run code when it is loaded",
            where=args.model,
            next_step="if you know where it comes from: --trust",
        )
    if not _is_model(args.model) and not args.model.endswith(".pt2"):
        return _graph_of_run(args)
    from clew.api.look import trace

    model, inputs, named = load_model(args)
    has_stats = args.color not in (None, "op")
    return trace(model, *inputs, summary=has_stats, no_grad=False, **named), "op"


def _read_graph(path: Path) -> Graph:
    from clew.model.graph import Graph

    try:
        return Graph.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the graph: {error.strerror}",
            where=str(path),
            next_step="save one with -o graph.json",
        ) from error


def _graph_of_run(args: Namespace) -> tuple[Graph, str]:
    from clew.api.read import open_run
    from clew.views.graph_run import graph_of_run

    if args.step is not None and not re.fullmatch(r"\d+|latest", args.step):
        raise UsageError(f"'{args.step}' is no step", next_step="write --step 12 or --step latest")
    step = int(args.step) if args.step is not None and args.step.isdigit() else "latest"
    run = open_run(args.model, root=find_root(args))
    return graph_of_run(run, kind=args.kind or "output", step=step, rank=args.rank), args.stat or "l2"
