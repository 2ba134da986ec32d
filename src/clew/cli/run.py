"""``clew run``: a training script, recorded, that otherwise behaves as if Python had started it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from clew.cli.script_words import split_at_script
from clew.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from clew.cli.parser import Parser
    from clew.replay.stops import Stops

_SWITCHES: Final = (
    *("--no-status", "--no-histograms", "--no-hashes", "--no-doctor", "--no-data"),
    *("--pdb", "-h", "--help"),
)
"""Options without a value; every other one takes the next word."""


def configure(parser: Parser) -> None:
    """Add the settings; one that is not given comes from the settings file or the environment."""
    parser.usage = "clew run [options] SCRIPT ...\n       clew run [options] -m MODULE ..."
    parser.epilog = "Everything after the script or module belongs to it, options too."
    parser.add_argument("--budget", metavar="SHARE", help="share of the time clew may take: 3%%, 0.03, off")
    parser.add_argument(
        "--every", metavar="N", help="record every Nth step instead of by budget, and the first 20"
    )
    parser.add_argument("--sites", metavar="GLOBS", help="record these sites only: 'layers.*,!*.norm'")
    parser.add_argument("--kinds", metavar="KINDS", help="record these kinds only: 'output,grad'")
    parser.add_argument("--out", metavar="DIR", help="folder that holds the runs (runs)")
    parser.add_argument("--name", metavar="NAME", help="name of the run")
    parser.add_argument("--quota", metavar="SIZE", help="how large the run may grow: 2GB, off")
    parser.add_argument(
        "--watch", metavar="EXPR", action="append", help="watchpoint: 'layers.*:grad l2>100', recommended"
    )
    parser.add_argument(
        "--on-hit", metavar="ACTION", help="when a watchpoint fires: log, snapshot, pause, stop"
    )
    parser.add_argument(
        "--on-nonfinite", metavar="POLICY", help="on NaN in loss or gradient: explain, stop, skip:N"
    )
    parser.add_argument(
        "--hang-timeout", metavar="SECONDS", help="write all stacks when no step ends for so long"
    )
    parser.add_argument(
        "--snapshots", metavar="WHEN", help="keep the state to execute steps again: auto, every:N, off"
    )
    parser.add_argument("--snapshot-limit", metavar="SIZE", help="how much snapshots may take: 1GB")
    parser.add_argument(
        "--keep-batches", metavar="N", help="keep the batches of the last N steps, 0 for none"
    )
    parser.add_argument(
        "--explain", metavar="HOW", help="who executes a bad step again: fork, process (afterwards), off"
    )
    _add_stops(parser)
    for name, text in (
        ("status", "no live line on the terminal"),
        ("histograms", "do not record histograms"),
        ("hashes", "do not record hashes"),
        ("doctor", "do not look for faults while the run goes on"),
        ("data", "keep none of the data that goes through the model: no batches, no inputs for tests"),
    ):
        parser.add_argument(f"--no-{name}", dest=name, action="store_const", const=False, help=text)


def _add_stops(parser: Parser) -> None:
    parser.add_argument(
        "--break",
        dest="breaks",
        metavar="PLACE",
        action="append",
        help="stop there: 'layers.3:forward if out.abs().max() > 100', op:softmax, step:10, train.py:42",
    )
    parser.add_argument("--shell-at-step", metavar="N", type=int, help="open the prompt when step N begins")
    parser.add_argument(
        "--pdb", action="store_true", help="look at the frames of an exception that ends the script"
    )
    parser.add_argument(
        "--commands", metavar="FILE", help="execute these commands at the stops instead of asking"
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return clew's own words, and those of the script."""
    return split_at_script(words, switches=_SWITCHES)


def execute(args: Namespace) -> int:
    """Record the script and return its exit code."""
    target, *script_args = _take_target(args.rest)
    is_module = args.rest[0] == "-m"

    from clew.capture.settings import SETTING_KEYS, load_settings

    settings = load_settings({key: getattr(args, key, None) for key in SETTING_KEYS})

    from clew.api.record import run_script

    return run_script(target, script_args, module=is_module, settings=settings, stops=_read_stops(args))


def _read_stops(args: Namespace) -> Stops | None:
    """Return where to stop, understood before the script starts; None when nothing was asked for."""
    if not (args.breaks or args.shell_at_step is not None or args.pdb):
        if args.commands is not None:
            raise UsageError(
                "--commands without a place to stop", next_step="add --break, --shell-at-step or --pdb"
            )
        return None
    from clew.cli.commands import read_commands
    from clew.replay.breakpoint import parse_breakpoint
    from clew.replay.stops import Stops

    stops = Stops(
        tuple(args.breaks or ()),
        args.shell_at_step,
        post_mortem=args.pdb,
        commands=read_commands(args.commands),
    )
    for text in stops.breaks:
        parse_breakpoint(text)
    return stops


def _take_target(rest: list[str]) -> list[str]:
    words = rest[1:] if rest[:1] == ["-m"] else rest
    if not words:
        what = "no module after -m" if rest else "no script to run"
        raise UsageError(what, where="clew run", next_step="clew run train.py, or clew run -m package.train")
    if words[0] == "-":
        raise UsageError("a script on standard input cannot be recorded", next_step="write it to a file")
    return words
