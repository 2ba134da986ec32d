"""Models in the wrong mode, and layers that are used in a way they are not made for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.doctor.loop_words import call_site, said_at
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_STEPS: Final = 2
_STEPS_FROM_THE_START: Final = 3


@rule(
    "M06",
    "training-in-eval-mode",
    severity="error",
    watches="the mode of a model in the forward passes before its optimizer's step",
    threshold="eval in 2 steps after it was train; from the start, 3 steps and most of the model trainable",
    silent="frozen batch normalisation leaves the model in train mode; a mixed step counts as training",
    hint="call model.train() after every evaluation",
    needs=("probe:modes", "optimizer"),
    explains=("T02", "M08"),
)
def training_in_eval_mode(case: Case) -> Iterator[Found]:
    """The model is trained in eval mode."""
    for note in case.noted("step-in-eval"):
        after_training = note["steps_in_training"] > 0
        if note["count"] < (_STEPS if after_training else _STEPS_FROM_THE_START):
            continue
        if not after_training and (not note["sensitive"] or note["trainable_share"] < 0.5):
            continue
        concerned = ", ".join(note["sensitive"][:3])
        begin = (
            "call model.train() again after the evaluation" if after_training else "call model.train() first"
        )
        yield Found(
            int(note["step"]) - note["count"] + 1,
            site=note["root"],
            evidence={"steps_in_eval_mode": note["count"], "steps_in_train_mode": note["steps_in_training"]},
            source=note["source"],
            hint=f"{begin}: {concerned} is switched off or frozen in eval mode" if concerned else begin,
            severity=_weigh(after_training=after_training, matters=bool(concerned)),
        )
        return


def _weigh(*, after_training: bool, matters: bool) -> str:
    if not matters:
        return "info"
    return "error" if after_training else "warning"


@rule(
    "M07",
    "validation-in-train-mode",
    severity="warning",
    watches="calls of a trained model without gradients, in train mode",
    threshold="3 different batches in a row, one that comes back 3 times, or 4 times a new one and a loss, with "
    "dropout or batch statistics on",
    silent="generators, pseudo-labels, dropout as a sample and refreshed batch statistics are recognised",
    hint="call model.eval() before validation",
    needs=("probe:modes", "optimizer"),
    explains=("V01",),
)
def validation_in_train_mode(case: Case) -> Iterator[Found]:
    """The model is validated in train mode."""
    for note in case.noted("validation-in-train"):
        if note.get("gaps") and not _has_losses(case, note["gaps"]):
            continue
        yield Found(
            int(min(note.get("gaps") or [note["step"]])),
            site=note["root"],
            evidence={"batches": note["batches"], "switched_on": ", ".join(note["sensitive"][:3])},
            source=note["source"],
            hint=f"call model.eval() before the evaluation{said_at(note['source'])} and model.train() after it: "
            f"{', '.join(note['sensitive'][:3])} acts differently",
        )
        return


def _has_losses(case: Case, steps: list[int]) -> bool:
    """Return whether a loss was computed from what a model gave without gradients, before most of some steps."""
    evaluated = {int(note["at"]) for note in case.noted("evaluation")}
    return 2 * sum(step in evaluated for step in steps) > len(steps)


@rule(
    "M08",
    "dropout-in-eval",
    severity="error",
    watches="dropout inside a trained model that is called in eval mode",
    threshold="one that is on; a random mask that takes numbers out and makes the others larger (warning)",
    silent="dropout modules that were switched on by hand are meant to be a sample",
    hint="give dropout training=self.training",
    needs=("probe:calls", "optimizer"),
    explains=("V01",),
)
def dropout_in_eval(case: Case) -> Iterator[Found]:
    """Dropout stays on in eval mode."""
    notes = case.noted("dropout-in-eval")
    if notes:
        note = notes[0]
        name = note["function"]
        if name.startswith("nn."):
            change = f"{name} is not part of the model, so eval() does not reach it: make it in __init__"
        elif "attention" in name:
            change = f"give {name} dropout_p={note['p']:g} if self.training else 0.0"
        else:
            change = f"give {name} training=self.training"
        yield Found(
            int(note["step"]),
            site=note["root"],
            evidence={"function": name, "p": note["p"], "calls": len(notes)},
            source=note["source"],
            hint=f"{change}{said_at(note['source'])}",
        )
        return
    evaluated = {note["root"] for note in case.noted("eval-call")}
    for note in case.noted("changed-input"):
        if note.get("mask") and note["site"] in evaluated:
            yield _tell_mask(note)
            return


def _tell_mask(note: dict[str, Any]) -> Found:
    mask = note["mask"]
    return Found(
        0,
        site=note["site"],
        severity="warning",
        title="dropout that is written out stays on in eval mode",
        evidence={"function": "a random mask", "p": mask["p"]},
        source=mask["source"],
        hint=f"the random mask{said_at(mask['source'])} is drawn in eval mode too: return the input as it is unless "
        "self.training",
    )


@rule(
    "M16",
    "extreme-dropout",
    severity="warning",
    watches="the probabilities of dropout in a model that is trained",
    threshold="0.9 or more",
    silent="healthy models keep most of their activations",
    hint="p is the share that is dropped, not the share that is kept",
    needs=("probe:calls",),
    explains=("V02", "D06", "M20"),
)
def extreme_dropout(case: Case) -> Iterator[Found]:
    """Dropout leaves almost nothing."""
    notes = case.noted("extreme-dropout")
    if notes:
        note = notes[0]
        yield Found(
            int(note["step"]),
            site=note["site"],
            evidence={"p": note["p"], "layers": len(notes)},
            source=note["source"],
            hint=f"{call_site(note['site'])} drops {note['p']:.0%}: p is the share that is dropped, not the one "
            "that is kept",
        )


@rule(
    "M19",
    "batchnorm-tiny-batch",
    severity="warning",
    watches="how many values batch normalisation has for a channel",
    threshold="2 or fewer, in 3 calls and at least half of all; 1 makes torch raise",
    silent="a small last batch is one call of many",
    hint="use larger batches or GroupNorm",
    needs=("probe:calls",),
    explains=("N06", "V03", "O08", "M20", "V02"),
)
def batchnorm_tiny_batch(case: Case) -> Iterator[Found]:
    """Batch normalisation has too few values to normalise by."""
    for note in case.noted("few-values"):
        yield Found(
            int(note["step"]),
            site=note["site"],
            evidence={"values_per_channel": note["values"], "calls": note["calls"], "of": note["of"]},
            source=note["source"],
            hint=f"{call_site(note['site'])} sees {note['values']} values per channel: use larger batches, GroupNorm "
            "or LayerNorm",
        )
        return
    for note in case.noted("error"):
        if "Expected more than 1 value per channel when training" in note["message"]:
            yield Found(
                int(note["step"]),
                evidence={"values_per_channel": 1, "error": note["message"][:120]},
                source=note["source"],
                hint="a batch of one sample reached batch normalisation: use drop_last=True in the loader or GroupNorm",
            )
            return


@rule(
    "M22",
    "stale-spectral-norm",
    severity="warning",
    watches="torch.nn.utils.spectral_norm in a model that is evaluated before it is trained",
    threshold="an estimate of the norm that nothing has written to yet",
    silent="training and loading write to it; torch.nn.utils.parametrizations.spectral_norm starts with an estimate",
    hint="run a forward in train mode first, or use torch.nn.utils.parametrizations.spectral_norm",
    needs=("probe:calls", "optimizer"),
)
def stale_spectral_norm(case: Case) -> Iterator[Found]:
    """A spectral norm is used before it was estimated."""
    for note in case.noted("raw-spectral-norm"):
        yield Found(int(note["step"]), site=note["layers"][0], evidence={"layers": note["count"]})
        return


@rule(
    "T02",
    "evaluation-builds-graph",
    severity="warning",
    watches="calls of a trained model in eval mode that keep a graph",
    threshold="10 without a backward",
    silent="attacks and saliency maps call backward",
    hint="evaluate under torch.no_grad()",
    needs=("probe:modes", "optimizer"),
    explains=("T03",),
)
def evaluation_builds_graph(case: Case) -> Iterator[Found]:
    """Evaluation keeps graphs that nothing uses."""
    for note in case.noted("graph-in-eval"):
        yield Found(
            int(note["step"]),
            site=note["root"],
            evidence={"calls": note["calls"]},
            source=note["source"],
            hint=f"put the evaluation{said_at(note['source'])} under torch.no_grad(): each call keeps its activations",
        )
        return
