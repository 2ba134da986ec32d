"""``clew rules``: every rule of the doctor, what it watches, its threshold, and why healthy code is safe from it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add how to print."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: Namespace) -> int:
    """Print the rules."""
    from clew.doctor.catalogue import load_rules

    rules = [rule.to_json() for rule in load_rules(lambda text: print(text, file=sys.stderr))]
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump({"rules": rules}))
        return 0
    from clew.render.terminal import show
    from clew.views.diagnosis_page import make_rules_page

    show(make_rules_page(rules))
    return 0
