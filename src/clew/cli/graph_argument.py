"""A graph on the command line: of a model that is traced, of a recorded run, or saved before as JSON."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from clew.cli.choice import add_root, find_root
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path

    from clew.cli.parser import Parser
    from clew.model.graph import Graph

_OF_A_RUN: Final = ("step", "kind", "stat")
_OF_A_MODEL: Final = ("input", "eval", "backward")

EPILOG: Final = "MODEL may also be a run (path, name or latest) or a graph saved as .json."


def add_run_options(parser: Parser) -> None:
    """Add what chooses the numbers of a recorded run."""
    parser.add_argument("--step", metavar="N", help="of a run: the step (the latest)")
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="of a run: the rank (0)")
    add_root(parser)


def check_options(args: Namespace) -> None:
    """Refuse options that what was named does not have, rather than ignoring them."""
    if args.model.endswith(".py"):
        raise UsageError(
            "a script alone names no model",
            where=args.model,
            next_step=f"write it like {args.model}:make_model",
        )
    of_a_model = is_model(args.model)
    names, owner = (_OF_A_RUN, "a recorded run") if of_a_model else (_OF_A_MODEL, "a model")
    for name in names:
        if getattr(args, name, None):
            raise UsageError(f"--{name} belongs to {owner}", where=args.model, next_step="leave it out")


def is_model(text: str) -> bool:
    """Return whether a word names a model: a script or a module, a colon and a name, or an exported program."""
    return text.endswith(".pt2") or re.search(r"(\.py|^[A-Za-z_][\w.]*):[A-Za-z_]", text) is not None


def read_graph(path: Path) -> Graph:
    """Return the graph that was saved as JSON."""
    from clew.model.graph import Graph

    try:
        return Graph.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the graph: {error.strerror}",
            where=str(path),
            next_step="save one with clew graph MODEL -o graph.json",
        ) from error


def graph_of_chosen_run(args: Namespace, *, kind: str = "output", gradients: bool = False) -> Graph:
    """Return the modules of the run that was named, with the statistics of the step that was asked for."""
    from clew.api.read import open_run
    from clew.views.graph_run import graph_of_run

    if args.step is not None and not re.fullmatch(r"\d+|latest", args.step):
        raise UsageError(f"'{args.step}' is no step", next_step="write --step 12 or --step latest")
    step = int(args.step) if args.step is not None and args.step.isdigit() else "latest"
    run = open_run(args.model, root=find_root(args))
    return graph_of_run(run, kind=kind, step=step, rank=args.rank, gradients=gradients)
