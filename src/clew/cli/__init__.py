"""The command line: one command per file, loaded when it is called; errors become exit codes here."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from clew import __version__
from clew.errors import ClewError, UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "run": ("clew.cli.run", "run a training script and record it"),
    "ls": ("clew.cli.ls", "list the runs, newest first"),
    "show": ("clew.cli.show", "show one run, or the statistics of some of its sites"),
    "doctor": ("clew.cli.doctor", "say what is wrong with a run, and what to change"),
    "rules": ("clew.cli.rules", "list the rules of the doctor"),
    "preflight": ("clew.cli.preflight", "rehearse a training script before a long run"),
    "why": ("clew.cli.why", "name the operation and the line that made the first NaN"),
    "replay": (
        "clew.cli.replay",
        "execute a recorded step again and go back and forth in it",
    ),
    "pause": ("clew.cli.pause", "stop a training that is going on, from another terminal"),
    "attach": ("clew.cli.attach", "look around in a training that is going on, and let it go on"),
    "repro": ("clew.cli.repro", "write a test that fails until a recorded fault is mended"),
    "export": ("clew.cli.export", "write a run as CSV, JSON, Parquet or for TensorBoard"),
    "rm": ("clew.cli.rm", "delete runs"),
    "plot": ("clew.cli.plot", "draw the loss or any number of one or several runs"),
    "pprint": ("clew.cli.pprint", "print a model as a table of operations or modules"),
    "graph": ("clew.cli.graph", "draw a model, a run, an exported program or a saved graph"),
    "diff": ("clew.cli.diff", "say where and why two runs part"),
    "determinism": ("clew.cli.determinism", "run a script twice and say where the runs part"),
    "ckpt": ("clew.cli.ckpt", "show, compare and scan checkpoints"),
}
"""Name of each command, its module, and what it does.

A module offers ``configure(parser)``, which adds arguments, and ``execute(args)``, which gives the exit code.
"""

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""What a shell reports for a program that was stopped by Ctrl-C, or whose reader went away."""
_UNWRITABLE: Final = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    runs_script = words[:1] == ["run"]
    try:
        if os.environ.get("CLEW_LOG"):
            from clew import logs

            logs.configure()
        code = _dispatch(words)
        if not runs_script:
            sys.stdout.flush()
    except ClewError as error:
        print(f"clew: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # Ctrl-C in a script must end this process as it would end Python: by the signal.
        if runs_script:
            raise
        return INTERRUPTED
    except BrokenPipeError:
        _silence_output()
        return BROKEN_PIPE
    except OSError as error:
        if runs_script or error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _silence_output()
        print(f"clew: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return ClewError.exit_code
    return code


def _silence_output() -> None:
    """The interpreter flushes once more on its way out; give it somewhere to write."""
    with contextlib.suppress(OSError, ValueError):  # not a file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        return _explain(words[1:2])
    if words[0] in ("-V", "--version"):
        print(f"clew {__version__}")
        return 0
    return _call(words[0], words[1:])


def _explain(names: list[str]) -> int:
    if names:
        return _call(names[0], ["--help"])
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    print("usage: clew COMMAND ...\n\nThe debugger for neural-network training.\n\ncommands:")
    print("\n".join(lines))
    print("\n'clew COMMAND --help' explains a command, 'clew --version' tells which clew.")
    return 0


def _call(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise UsageError(
            f"unknown {kind} '{name}'",
            next_step=suggest(name, [*COMMANDS, "--help", "--version"]) or "'clew --help' lists the commands",
        )
    from clew.cli.parser import Parser

    home, text = COMMANDS[name]
    command: Any = import_module(home)
    parser = Parser(name, text)
    command.configure(parser)
    # ``clew run`` alone takes words that are not its own: those of the script.
    own, rest = command.split(words) if hasattr(command, "split") else (words, [])
    args = parser.parse(own)
    if args is None:
        return 0
    args.rest = rest
    return int(command.execute(args))
