"""``clew doctor``: what is wrong with a run, and what to change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clew.cli.choice import add_run, open_chosen, tell_problems

if TYPE_CHECKING:
    from argparse import Namespace

    from clew.cli.parser import Parser
    from clew.model.finding import Diagnosis, Finding


def configure(parser: Parser) -> None:
    """Add the run, the strictness and how to print."""
    add_run(parser)
    parser.add_argument(
        "--watch",
        metavar="EXPR",
        action="append",
        default=[],
        help="judge a watchpoint, too: 'fc*:grad l2>100'",
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 when there are warnings")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "Exit code: 0 healthy, 1 warnings with --strict, 2 errors."


def execute(args: Namespace) -> int:
    """Print the diagnosis; the exit code says how bad it is."""
    from clew.api.doctor import diagnose

    run = open_chosen(args)
    diagnosis = diagnose(run, watch=args.watch)
    tell_problems(run)
    if args.json:
        from clew.render.json import dump

        sys.stdout.write(dump(diagnosis.to_json()))
    else:
        from clew.render.terminal import show
        from clew.views.diagnosis_page import make_page

        show(make_page(diagnosis, name=run.name))
    return _exit_code(diagnosis, strict=args.strict)


def _exit_code(diagnosis: Diagnosis, *, strict: bool) -> int:
    severities = {each.severity for finding in diagnosis.findings for each in _with_consequences(finding)}
    if "error" in severities:
        return 2
    return 1 if strict and "warning" in severities else 0


def _with_consequences(finding: Finding) -> tuple[Finding, ...]:
    return (finding, *finding.explains)
