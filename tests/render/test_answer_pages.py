"""What the doctor and ``clew why`` say on a terminal, as people read it."""

from __future__ import annotations

from pathlib import Path

from clew.model.finding import Diagnosis, Finding, NotChecked
from clew.render.terminal import Screen, lower
from clew.replay.words import say
from clew.views import diagnosis_page, why_page

SCREEN = Screen(width=80, color=False)


def test_a_diagnosis(golden):
    collapse = Finding("M20", "output-collapse", "warning", 12, "the outputs are all the same", site="head")
    cause = Finding(
        "N01",
        "nonfinite-forward",
        "error",
        9,
        "log made NaN or infinity in the forward pass",
        site="criterion",
        evidence={"op": "log", "share": 0.03125, "elements": 1234, "indices": list(range(9))},
        source=str(Path.cwd() / "package" / "train.py") + ":33",
        hint="keep the argument away from 0, or use log_softmax instead of log(softmax(x)) and nll_loss",
        explains=(collapse,),
    )
    elsewhere = Finding("D06", "few-batches", "warning", 300, "a fault", rank=1, source="/far/away/data.py:7")
    diagnosis = Diagnosis(
        (cause, elsewhere),
        ("N01", "D06", "M20"),
        (
            *(NotChecked(f"X0{number}", "the run has one rank") for number in range(1, 7)),
            *(NotChecked(f"O{number:02}", "no optimizer was seen to step") for number in range(1, 14)),
            NotChecked("V01", "fewer than four validation losses were seen; log them as val_loss"),
        ),
    )
    golden("diagnosis.txt", lower(diagnosis_page.make_page(diagnosis, name="demo"), SCREEN))


def test_a_healthy_run(golden):
    golden("healthy.txt", lower(diagnosis_page.make_page(Diagnosis((), ("N01", "D06"))), SCREEN))


def test_a_verdict(golden):
    line = f"{Path.cwd() / 'train.py'}:33"
    verdict = {
        "found": True,
        "step": 39,
        "phase": "forward",
        "op": "log",
        "site": "criterion",
        "source": {
            "file": str(Path.cwd() / "train.py"),
            "line": 33,
            "text": "return -(torch.log(chance) * one_hot(labels, 4)).sum(1).mean()",
        },
        "symptom": "loss",
        "sample": 17,
        "inputs": [{"dtype": "float32", "shape": [32, 4], "min": 0.0, "max": 1.0, "role": "computed"}],
        "elements": [{"index": [17, 0], "value": "-inf", "inputs": [0.0]}],
        "chain": [
            {"op": op, "site": "criterion", "line": line} for op in ("log", "mul", "sum", "mean", "neg")
        ],
        "replay": "identical",
        "hint": "keep the argument away from 0: torch.log(x.clamp_min(1e-8)), or log_softmax instead",
    }
    golden("verdict.txt", lower(why_page.make_page(verdict), SCREEN))
    golden(
        "verdict_unfound.txt",
        lower(
            why_page.make_page({"found": False, "step": 3, "notes": ["the replay ended before the step"]}),
            SCREEN,
        ),
    )


def test_a_verdict_does_not_call_a_mask_finite():
    verdict = {"found": True, "step": 1, "phase": "forward", "op": "softmax", "elements": [{"value": "nan"}]}
    said = {
        word: say({**verdict, "inputs": [{"inf": 0, "nan": 0}, {word: 150}]})
        for word in ("inf", "nan", "zero")
    }
    assert said == {
        "inf": "softmax made NaN out of numbers with infinities among them",
        "nan": "softmax made NaN out of numbers with NaN among them",
        "zero": "softmax made NaN out of finite numbers",
    }
