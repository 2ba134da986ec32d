"""``clew rules``: the rules of the doctor, or some in full: what they watch, when they speak, when not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser


def configure(parser: Parser) -> None:
    """Add which rules, and how to print."""
    parser.add_argument("rules", metavar="RULE", nargs="*", help="these in full, by id or name, such as N01")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: Namespace) -> int:
    """Print all rules, or the chosen ones in full."""
    from clew.doctor.catalogue import load_rules

    rules = [rule.to_json() for rule in load_rules(lambda text: print(text, file=sys.stderr))]
    rules = [_find(wanted, rules) for wanted in args.rules] or rules
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump({"rules": rules}))
        return 0
    from clew.render.terminal import show
    from clew.views.diagnosis_page import make_rule_page, make_rules_page

    show(make_rule_page(rules) if args.rules else make_rules_page(rules))
    return 0


def _find(wanted: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    named = {name.lower(): rule for rule in rules for name in (rule["id"], rule["rule"])}
    if wanted.lower() not in named:
        ids, names = ([rule[key] for rule in rules] for key in ("id", "rule"))
        near = suggest(wanted.upper(), ids) or suggest(wanted.lower(), names)
        next_step = near or "'clew rules' lists them"
        raise UsageError(f"there is no rule '{wanted}'", where="clew rules", next_step=next_step)
    return named[wanted.lower()]
