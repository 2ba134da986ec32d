"""The parser of one command: argparse with clew's errors, and the arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting, and knows which option was meant."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(
            prog=f"clew {name}",
            description=text[0].upper() + text[1:] + ".",
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("-h", "--help", action="store_true", help="show this text")

    def parse(self, words: Sequence[str]) -> argparse.Namespace | None:
        """Return the arguments, or None after the help text was asked for and printed."""
        if {"-h", "--help"} & set(words):
            self.print_help()
            return None
        args, unknown = self.parse_known_args(list(words))
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            wrong = unknown[0].split("=")[0]
            raise UsageError(
                f"unknown argument '{wrong}'",
                where=self.prog,
                next_step=suggest(wrong, options) or f"'{self.prog} --help' lists what it takes",
            )
        return args

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise UsageError(message, where=self.prog, next_step=f"'{self.prog} --help' lists what it takes")
