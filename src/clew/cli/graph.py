"""``clew graph``: the picture of a model, of a recorded run, of an exported program or of a saved graph."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clew.cli.graph_argument import (
    EPILOG,
    add_run_options,
    check_options,
    graph_of_chosen_run,
    is_model,
    read_graph,
)
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
    parser.add_argument("--format", metavar="NAME", help="instead of the ending; tensorboard writes a folder")
    parser.add_argument(
        "--depth", metavar="N", type=int, help="levels of modules to open (as many as are readable)"
    )
    parser.add_argument("--color", metavar="WHAT", help="op, health, or a statistic such as std (op)")
    parser.add_argument("--verbose", action="store_true", help="show arguments and what needs a gradient")
    parser.add_argument(
        "--trust", action="store_true", help="load an exported program, which may run code in it"
    )
    parser.add_argument("--kind", metavar="KIND", help="of a run: what was measured, such as grad (output)")
    parser.add_argument("--stat", metavar="NAME", help="of a run: the statistic to colour by (l2)")
    add_run_options(parser)
    parser.epilog = EPILOG


def execute(args: Namespace) -> int:
    """Draw into a file, or show a page."""
    from clew.api import picture

    check_options(args)
    if args.color is not None and args.stat is not None:
        raise UsageError("both --color and --stat say what to colour by", next_step="give one of them")
    if args.output is not None:
        picture.choose_format(Path(args.output), args.format)
    elif args.format is not None:
        raise UsageError("--format needs a file", next_step="name it with -o FILE")
    graph, color = _find_graph(args)
    options = {"color": args.color or color, "verbose": args.verbose, "depth": args.depth}
    if args.output is None:
        picture.view(graph, **options)
        return 0
    path = picture.save(graph, args.output, format=args.format, **options)
    print(f"{path}: {len(graph.operations)} operations")
    return 0


def _find_graph(args: Namespace) -> tuple[Graph, str]:
    """Return the graph, and what to colour it by unless that was said."""
    if args.model.endswith(".json"):
        return read_graph(Path(args.model)), "op"
    if not is_model(args.model):
        return graph_of_chosen_run(args, kind=args.kind or "output"), args.stat or "l2"
    from clew.api.look import trace

    model, inputs, named = load_model(args)
    has_stats = args.color not in (None, "op")
    return trace(model, *inputs, summary=has_stats, no_grad=False, **named), "op"
