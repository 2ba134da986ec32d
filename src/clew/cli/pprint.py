"""``clew pprint``: the table of a model, of a recorded run, of an exported program or of a saved graph."""

from __future__ import annotations

import sys
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

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.api.look import Trace
    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add the model, its inputs, what to measure and how to print."""
    add_model(parser)
    parser.add_argument("--depth", metavar="N", type=int, help="one row per module down to this depth")
    parser.add_argument("--summary", action="store_true", help="statistics of every value")
    parser.add_argument(
        "--backward", action="store_true", help="run the backward pass too, and tell the gradients"
    )
    parser.add_argument("--to", metavar="FORM", help="json, csv, html, or a file with such an ending")
    parser.add_argument(
        "--trust", action="store_true", help="load an exported program, which may run code in it"
    )
    parser.add_argument("--width", metavar="N", type=int, help="columns of the table (those of the terminal)")
    add_run_options(parser)
    parser.epilog = (
        f"{EPILOG}\n"
        "The script is imported and make_model() called; what stands under\n"
        "if __name__ == '__main__' does not run.\n"
        "A make_model() may return (model, input, ...) and needs no --input then."
    )


def execute(args: Namespace) -> int:
    """Trace the model, or read what was recorded, and print the table."""
    check_options(args)
    text = _find_graph(args).pprint(depth=args.depth, to=args.to, width=args.width)
    if text is not None and args.to in ("json", "csv", "html"):
        sys.stdout.write(text)
    return 0


def _find_graph(args: Namespace) -> Trace:
    from clew.api.look import as_trace, trace

    if args.model.endswith(".json"):
        return as_trace(read_graph(Path(args.model)))
    if not is_model(args.model):
        return as_trace(graph_of_chosen_run(args, gradients=True))
    model, inputs, named = load_model(args)
    return trace(model, *inputs, backward=args.backward, summary=args.summary, **named)
