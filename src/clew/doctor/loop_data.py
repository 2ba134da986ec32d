"""Data that is the same too often, in the wrong order, or on both sides of a split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.doctor.loop_words import said_at
from clew.doctor.measure import round_number
from clew.doctor.rule import Found, NotJudged, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_FEWEST_LABELS: Final = 256
_FEWEST_ROWS: Final = 5
_SHARE: Final = 0.02
_CHANCE: Final = 1e-11
"""Rows with so many different numbers in so many columns are equal because one was copied."""

_MOST_WINDOWS: Final = 0.5
"""Windows drawn at random from the text that is trained on, to tell the training loss, are seldom the very same."""


@rule(
    "D03",
    "identical-samples",
    severity="error",
    watches="the samples of a batch, all inputs of a model together",
    threshold="all equal in 2 batches of 4 or more samples with 4 or more numbers each",
    silent="real samples differ; labels, masks and positions may be equal as long as something differs",
    hint="look at __getitem__: does it use its index?",
    needs=("probe:data",),
    explains=("M20", "V02", "D06", "M09", "D04"),
)
def identical_samples(case: Case) -> Iterator[Found]:
    """Every sample of a batch is the same."""
    notes = case.noted("equal-samples")
    if notes and notes[-1]["count"] >= 2:
        yield Found(
            int(notes[0]["step"]),
            site=notes[0]["site"],
            evidence={"batches": notes[-1]["count"], "shape": notes[0]["shape"]},
            source=notes[0]["source"],
            hint=f"all {notes[0]['shape'][0]} samples of a batch are equal: does __getitem__ (or what makes the batch) "
            "use its index?",
        )


@rule(
    "D04",
    "same-batch-every-step",
    severity="warning",
    watches="the batches that loaders give and training uses",
    threshold="the same one 10 times, each time from a new iterator that has more, or is left before its end",
    silent="training on one batch on purpose fetches it once; loaders of one batch have no other",
    hint="make the iterator once, before the loop",
    needs=("probe:data",),
    explains=("V01", "X04", "T01"),
)
def same_batch_every_step(case: Case) -> Iterator[Found]:
    """Every step trains on the first batch of the loader."""
    for note in case.noted("same-batch"):
        yield Found(
            max(int(note["step"]) - note["count"] + 1, 0),
            evidence={"equal_batches": note["count"], "batches_of_the_loader": note["batches"] or "unknown"},
            source=note["source"],
            hint="next(iter(loader)) in the loop starts at the first batch each time: write `for batch in loader`",
        )
        return


@rule(
    "D05",
    "workers-share-randomness",
    severity="error",
    watches="random generators that a data set owns, and the workers of its loader",
    threshold="a generator used after __init__, 2 or more workers, no worker_init_fn",
    silent="torch seeds its own, numpy's and Python's global generators apart in each worker",
    hint="make the generator in the worker, from torch.initial_seed()",
    needs=("probe:workers",),
)
def workers_share_randomness(case: Case) -> Iterator[Found]:
    """The workers of a loader all draw the same random numbers."""
    for note in case.noted("shared-generator"):
        yield Found(
            int(note["step"]),
            evidence={"generator": note["attribute"], "type": note["type"], "workers": note["workers"]},
            source=note["source"],
            hint=f"each of the {note['workers']} workers gets a copy of {note['attribute']} in the same state: make it "
            "in the worker from torch.initial_seed(), or seed it in worker_init_fn",
        )
        return


@rule(
    "D10",
    "train-eval-overlap",
    severity="warning",
    watches="fingerprints of the rows that are trained on and of those that are evaluated",
    threshold="5 rows and 2 % of an evaluation were trained on before",
    silent="a pass over the training data itself, and targets made in every step, are no evaluation; rows of whole "
    "numbers may be equal by chance",
    hint="split before anything is copied or augmented",
    needs=("probe:overlap",),
    explains=("V01",),
)
def train_eval_overlap(case: Case) -> Iterator[Found]:
    """Rows of the evaluation were trained on."""
    notes = case.noted("evaluated-rows")
    shares = [note["trained"] / note["rows"] for note in notes]
    has_clean = any(share < _SHARE for share in shares[-6:]) and len(notes) > 1
    for note, share in zip(notes, shares, strict=True):
        if note["trained"] < _FEWEST_ROWS or share < _SHARE:
            continue
        # The whole training data, evaluated beside other data or without a loader of its own, is meant as such.
        if share > 0.98 and (has_clean or not note["has_loader"]):
            continue
        if _may_be_chance(note, share) or _is_clean_beside(note):
            continue
        yield Found(
            int(note["step"]),
            evidence={"rows": note["rows"], "trained_on": note["trained"], "share": round_number(share)},
            source=note["source"],
            hint=f"{note['trained']} of the {note['rows']} rows evaluated{said_at(note['source'])} are in the training "
            "data: split by sample or group first, copy and augment afterwards",
        )
        return


def _is_clean_beside(note: dict[str, Any]) -> bool:
    """Return whether the training data was passed through the model in one piece, and the other rows are new."""
    own = note.get("training_data", {"rows": 0, "trained": 0})
    rows, trained = note["rows"] - own["rows"], note["trained"] - own["trained"]
    return bool(own["rows"]) and rows >= _FEWEST_ROWS and trained < _SHARE * rows


def _may_be_chance(note: dict[str, Any], share: float) -> bool:
    """Return whether rows of whole numbers may be equal by chance, or are windows drawn from one long text."""
    if not note.get("is_whole"):
        return False
    if note["is_tokens"] and not note["has_loader"] and share < _MOST_WINDOWS:
        return True
    return bool(note["alike"]) and float(note.get("chance", 1.0)) > _CHANCE


@rule(
    "D11",
    "unshuffled-data",
    severity="warning",
    watches="how often the label changes from one sample to the next",
    threshold="under a tenth of what a random order gives, over 256 labels or more in several batches that differ",
    silent="shuffled data is at 0.9 to 1.1 of it; a batch that has all classes may order them; windows of one series "
    "come in order by right and are near each other",
    hint="shuffle=True",
    needs=("probe:data", "note:label-order"),
    explains=("V03", "V02", "M20", "O08"),
)
def unshuffled_data(case: Case) -> Iterator[Found]:
    """The training data is sorted by label."""
    for note in case.noted("label-order"):
        if note["labels"] >= _FEWEST_LABELS and _is_sorted(note):
            if note["neighbours"] < 0.5:
                raise NotJudged("neighbours resemble each other: a series in its natural order")
            yield Found(
                0,
                evidence={
                    "change_rate": round_number(note["change_rate"]),
                    "expected": round_number(note["expected_rate"]),
                    "labels": note["labels"],
                },
                hint="labels come in long runs of one class: give the DataLoader shuffle=True, or permute the rows in "
                "every epoch",
            )
            return


def _is_sorted(note: dict[str, Any]) -> bool:
    """Return whether labels come in long runs over the batches; batches of one class each in turns are made so."""
    expected = note["expected_rate"]
    # The first change of class may come right between two of the few batches that were seen.
    has_few_borders = note["border_rate"] < max(0.5 * expected, 1.5 / max(note.get("borders", 0), 6))
    is_rare = note["change_rate"] < 0.1 * expected and has_few_borders
    # Where each batch has all classes, their order inside it is nobody's concern: first the ones, then the zeros.
    is_apart = note.get("mixed_rate", 0.0) < 0.8 * expected
    return bool(expected > 0.1 and is_rare and is_apart)


@rule(
    "D17",
    "batch-size-mismatch",
    severity="error",
    watches="the leading dimensions of the tensors of one batch",
    threshold="features and labels disagree, in 2 batches or where the loss raises for it",
    silent="a smaller last batch is smaller in all tensors; sequences that come first are recognised",
    hint="look at the collate function",
    needs=("probe:data",),
    explains=("L05",),
)
def batch_size_mismatch(case: Case) -> Iterator[Found]:
    """The tensors of a batch have different numbers of samples."""
    notes = case.noted("uneven-batch")
    raised = next((note for note in case.noted("error") if _is_mismatch(note)), None)
    if len(notes) >= 2 or (notes and raised is not None):
        first = notes[0]
        yield _tell_mismatch(first, first["shapes"], first["source"])
    elif raised is not None:
        shapes = raised["batch"] or [raised.get("input_shape", []), raised.get("target_shape", [])]
        yield _tell_mismatch(raised, shapes, raised["source"])


def _tell_mismatch(note: dict[str, Any], shapes: list[list[int]], source: str) -> Found:
    sizes = sorted({shape[0] for shape in shapes if shape})
    return Found(
        int(note["step"]),
        evidence={"samples": sizes, "shapes": shapes[:4]},
        source=source,
        hint=f"the tensors of one batch hold {' and '.join(map(str, sizes))} samples: look at what cuts, filters or "
        "collates them",
    )


def _is_mismatch(note: dict[str, Any]) -> bool:
    """Return whether a loss was given as many outputs as there were inputs, and another number of targets."""
    given, targets = note.get("input_shape"), note.get("target_shape")
    if not given or not targets or given[0] == targets[0]:
        return False
    inputs = note.get("inputs") or []
    return any(shape and shape[0] == given[0] for shape in inputs) and not any(
        shape and shape[0] == targets[0] for shape in inputs
    )
