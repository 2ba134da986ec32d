"""``python -m benchmarks.doctor``: the doctor on trainings that are right and on trainings with one fault each.

The trainings are those of the tests: loops that look strange and are right, and every fault in several spellings. The
same runs go through torch-audit, which needs the model and the optimizer: it is given each optimizer as it is made and
the model that its parameters belong to. Its rules are counted as right where they name the same fault.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch_audit

import clew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TESTS = Path(__file__).parent.parent / "tests" / "doctor"
_HEALTHY = ("healthy_games", "healthy_steps", "healthy_data")
_FAULTS = {
    "test_loop_data": {
        "EQUAL": "D03", "SAME": "D04", "SHARED": "D05", "OVERLAP": "D10", "SORTED": "D11", "MISMATCH": "D17",
    },
    "test_loop_modes": {
        "EVAL_TRAINING": "M06", "TRAIN_VALIDATION": "M07", "EXTREME": "M16", "FEW_VALUES": "M19",
        "GRAPH_IN_EVAL": "T02",
    },
    "test_loop_schedule": {
        "EARLY": "O05", "SHORT": "O06", "REMADE": "O15", "RESEEDED": "P09", "MISUSED": "N05", "HALF": "N10",
        "SLOW": "T05",
    },
    "test_loop_weights": {"SYMMETRIC": "M13", "MIXED": "M09", "LEAKING": "M18"},
    "test_loop_gradients": {"STALE": "O01", "ERASED": "O02"},
    "test_loop_targets": {"UNSHIFTED": "D15"},
}  # fmt: skip
"""Lists of spellings in the tests, and the rule that names the fault."""

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


def main() -> int:
    """Run everything, print the table; the exit code is 1 when a healthy run has an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="every sixth training: a first look, not a result"
    )
    pick = slice(None, None, 6 if parser.parse_args().quick else 1)
    sys.path.insert(0, str(_TESTS))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    healthy = [("", name, loop) for name, loop in _list_healthy()][pick]
    faulty = list(_list_faults())[pick]
    print(
        f"clew {clew.__version__} and torch-audit 0.3.0 on {len(healthy)} healthy and {len(faulty)} faulty runs\n"
    )
    print(f"{'':13}{'false errors':>13}{'false warnings':>15}{'right id':>10}{'steps to it':>12}")
    worst = 0
    for tool, judge in (("clew", _ask_clew), ("torch-audit", _ask_torch_audit)):
        fine = [(name, judge(loop)) for _, name, loop in healthy]
        ill = [(id, name, judge(loop)) for id, name, loop in faulty]
        errors = sum(bool(verdict.errors) for _, verdict in fine)
        others = sum(bool(verdict.ids) and not verdict.errors for _, verdict in fine)
        right = [verdict for id, _, verdict in ill if id in verdict.ids]
        steps = [verdict.step for verdict in right if verdict.step is not None]
        middle = statistics.median(steps) if steps else float("nan")
        print(f"{tool:13}{errors:>13}{others:>15}{len(right):>4} / {len(ill):<3}{middle:>12g}")
        if tool == "clew":
            worst = errors
            _tell_wrong(fine, ill)
    return 1 if worst else 0


def _tell_wrong(fine: list[tuple[str, Verdict]], ill: list[tuple[str, str, Verdict]]) -> None:
    for name, verdict in fine:
        if verdict.ids:
            print(f"    false: {name}: {' '.join(verdict.ids)}")
    for id, name, verdict in ill:
        if id not in verdict.ids:
            print(f"    missed: {id} {name}: {' '.join(verdict.ids) or 'nothing'}")


def _list_healthy() -> list[tuple[str, Callable[[], Any]]]:
    for module in _HEALTHY:
        importlib.import_module(module)
    return list(importlib.import_module("healthy_loops").LOOPS.items())


def _list_faults() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    for module, lists in _FAULTS.items():
        for name, id in lists.items():
            found = getattr(importlib.import_module(module), name)
            pairs = found.items() if isinstance(found, dict) else [(each.__name__, each) for each in found]
            yield from ((id, str(spelling), loop) for spelling, loop in pairs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    torch.manual_seed(0)
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with contextlib.suppress(Exception), out, err:
        yield


def _ask_clew(loop: Callable[[], Any]) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        watch = clew.watch(out=folder, name="run", budget="off")
        with _quiet(), watch:
            loop()
        notes = clew.open_run(watch.path).notes("look")
        findings = [each for each in clew.diagnose(str(watch.path)).findings if each.severity != "info"]
    looks = [note["step"] for note in notes if findings and note["step"] >= findings[0].step]
    ids = [finding.id for finding in findings]
    return Verdict(ids, sum(each.severity == "error" for each in findings), (looks[0] + 1) if looks else None)


def _ask_torch_audit(loop: Callable[[], Any]) -> Verdict:
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
        with _quiet():
            loop()
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
