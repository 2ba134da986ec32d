"""``python -m benchmarks.doctor``: the doctor on trainings that are right and on trainings with one fault each.

The trainings are those of the tests (see ``doctor_runs``), watched with the settings a user has. The same runs go
through torch-audit, which needs the model and the optimizer: it is given each optimizer as it is made and the model
that its parameters belong to. Its rules are counted as right where they name the same fault.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import io
import json
import logging
import os
import statistics
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch_audit

import clew
from benchmarks.doctor_runs import Training, list_faulty, list_healthy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RESULT = Path(__file__).parent / "results" / "doctor.json"

_THEIRS = {
    "TA100": "N01 N02 D01", "TA102": "N06 O08", "TA103": "M11", "TA104": "M05 L08 M02", "TA105": "M11 M20",
    "TA301": "D07 D01", "TA302": "D03", "TA304": "M19", "TA305": "D01", "TA500": "M03", "TA203": "N10 T05",
}  # fmt: skip
"""Rules of torch-audit, and those of clew that name the same fault."""


class Verdict(NamedTuple):
    """What one tool said: the rules of weight, the worst first, and after how many steps the first one was known."""

    ids: list[str]
    errors: int
    step: int | None


@dataclass(frozen=True)
class Score:
    """What one tool said of all trainings."""

    tool: str
    healthy: list[tuple[Training, Verdict]]
    faulty: list[tuple[Training, Verdict]]

    @property
    def false_errors(self) -> list[str]:
        """The healthy trainings with an error."""
        return [training.name for training, verdict in self.healthy if verdict.errors]

    @property
    def false_warnings(self) -> list[str]:
        """The healthy trainings with a warning and no error."""
        return [training.name for training, said in self.healthy if said.ids and not said.errors]

    @property
    def right(self) -> list[Verdict]:
        """The verdicts on faulty trainings that hold the right rule."""
        return [verdict for training, verdict in self.faulty if training.id in verdict.ids]

    @property
    def steps(self) -> float:
        """The median number of steps until the right rule was known."""
        steps = [verdict.step for verdict in self.right if verdict.step is not None]
        return statistics.median(steps) if steps else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of the table, and what was wrong by name."""
        return {
            "tool": self.tool,
            "false_errors": self.false_errors,
            "false_warnings": self.false_warnings,
            "right": len(self.right),
            "median_steps": self.steps,
            "missed": [
                {"id": training.id, "name": training.name, "said": verdict.ids}
                for training, verdict in self.faulty
                if training.id not in verdict.ids
            ],
        }


def main() -> int:
    """Run everything, print the table; the exit code is 1 when a healthy run has an error."""
    args = _parse()
    pick = slice(None, None, 6 if args.quick else 1)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    healthy = [each for each in list_healthy() if args.only in each.name][pick]
    faulty = [each for each in list_faulty() if args.only in f"{each.id} {each.name}"][pick]
    rules = sorted({each.id for each in faulty})
    print(
        f"clew {clew.__version__} and torch-audit 0.3.0 on {len(healthy)} healthy trainings and {len(faulty)} with "
        f"a fault of {len(rules)} kinds\n\n"
        f"{'':13}{'false errors':>13}{'false warnings':>15}{'right id':>12}{'steps to it':>12}"
    )
    judges = {"clew": _ask_clew, "torch-audit": _ask_torch_audit}
    scores = [_judge(tool, judge, healthy, faulty) for tool, judge in judges.items()]
    for each in scores[0].to_json()["missed"]:
        print(f"    clew missed {each['id']} in {each['name']}: {' '.join(each['said']) or 'nothing'}")
    for training, verdict in scores[0].healthy:
        if verdict.ids:
            print(f"    clew false {' '.join(verdict.ids)} in {training.name}")
    if not (args.quick or args.only):
        _write(scores, healthy=len(healthy), faulty=len(faulty), rules=rules)
    return 1 if scores[0].false_errors else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="every sixth training: a first look, not a result"
    )
    parser.add_argument("--only", default="", help="trainings whose rule and name hold this text")
    return parser.parse_args()


def _judge(
    tool: str, judge: Callable[[Training], Verdict], healthy: list[Training], faulty: list[Training]
) -> Score:
    score = Score(tool, [(each, judge(each)) for each in healthy], [(each, judge(each)) for each in faulty])
    print(
        f"{tool:13}{len(score.false_errors):>13}{len(score.false_warnings):>15}"
        f"{len(score.right):>6} / {len(faulty):<3}{score.steps:>12g}",
        flush=True,
    )
    return score


def _write(scores: list[Score], **counts: Any) -> None:
    result = {
        "when": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "clew": clew.__version__,
        "torch": torch.__version__,
        **counts,
        "scores": [score.to_json() for score in scores],
    }
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[Path]:
    """Give a folder of its own to a training, keep what it prints and what it raises."""
    gc.collect()
    torch.manual_seed(0)
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception), out, err:
        yield Path(folder)


def _ask_clew(training: Training) -> Verdict:
    with tempfile.TemporaryDirectory() as out:
        watch = clew.watch(out=out, name="run")
        with _quiet() as folder, watch:
            training.run(folder)
        notes = clew.open_run(watch.path).notes("look")
        findings = [each for each in clew.diagnose(str(watch.path)).findings if each.severity != "info"]
    looks = [note["step"] for note in notes if findings and note["step"] >= findings[0].step]
    ids = [finding.id for finding in findings]
    return Verdict(ids, sum(each.severity == "error" for each in findings), (looks[0] + 1) if looks else None)


def _ask_torch_audit(training: Training) -> Verdict:
    auditors: list[Any] = []
    original = torch.optim.Optimizer.__init__

    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(optimizer, *args, **kwargs)
        with contextlib.suppress(Exception):
            model = _find_model(optimizer)
            if model is not None and len(auditors) < 4:
                auditors.append(
                    torch_audit.autopatch(
                        model,
                        optimizer=optimizer,
                        every_n_steps=1,
                        reporters=[],
                        suppress_internal_errors=True,
                    )
                )

    torch.optim.Optimizer.__init__ = __init__  # type: ignore[method-assign]
    try:
        with _quiet() as folder:
            training.run(folder)
    finally:
        torch.optim.Optimizer.__init__ = original  # type: ignore[method-assign]
    found = []
    for auditor in auditors:
        with contextlib.suppress(Exception):
            found += auditor.finish(report=False).findings
    weighty = [each for each in found if each.severity.name in ("WARN", "ERROR", "FATAL")]
    ids = [id for each in weighty for id in _THEIRS.get(each.rule_id, each.rule_id).split()]
    steps = [each.step for each in weighty if each.step is not None]
    return Verdict(
        ids, sum(each.severity.name != "WARN" for each in weighty), min(steps) + 1 if steps else None
    )


def _find_model(optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
    """Return the outermost module that holds the first parameter of an optimizer."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    owners = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.nn.Module) and any(p is first for p in each.parameters())
    ]
    return max(owners, key=lambda each: sum(1 for _ in each.modules()), default=None)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
