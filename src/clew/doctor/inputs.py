"""Inputs in a scale that the model is not made for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from clew.doctor.measure import round_number
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case


def _confirmed(case: Case, judge: Any) -> dict[str, Any] | None:
    """Return the first note of a layer for which every batch that was looked at has the fault."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for note in case.noted("first-input"):
        groups.setdefault(note["site"], []).append(note)
    for notes in groups.values():
        if len(notes) > 1 and all(judge(note) for note in notes):
            return notes[0]
    return None


@rule(
    "D07",
    "unscaled-input",
    severity="warning",
    watches="what enters the first linear, recurrent and convolutional layers, after any normalisation in the model",
    threshold="an image from 0 to over 50; a mean of over 20 standard deviations and over 1; a value beyond 1e4",
    silent="scaled inputs are near 1; what an embedding or a normalisation gives is not looked at",
    hint="divide images by 255, or subtract the mean and divide by the standard deviation of the training data",
    until=5,
    needs=("probe:stats", "note:first-input"),
    explains=("L11", "O08", "N01", "N02", "N06", "N07", "M11", "M12", "M20", "O12", "V03", "M21", "N08"),
)
def unscaled_input(case: Case) -> Iterator[Found]:
    """The input is not scaled."""
    note = _confirmed(case, _is_unscaled)
    if note is not None:
        evidence = {name: round_number(note[name]) for name in ("min", "max", "mean", "std")}
        yield Found(
            int(note["step"]),
            site=note["site"],
            evidence={**evidence, "shape": note["shape"]},
            hint=_tell_scale(note),
        )


def _tell_scale(note: dict[str, Any]) -> str:
    """Return what to do with bytes, with columns of a table, and with numbers that are all far from zero."""
    is_far = abs(note["mean"]) > 20 * note["std"]
    if _is_image(note) and note["min"] >= 0 and note["max"] <= 255 and not is_far:
        return f"the pixels run to {round_number(note['max'])}: divide the images by 255, and subtract their mean"
    if len(note["shape"]) == 2:
        return (
            "subtract from each column its mean over the training data and divide by its standard deviation, before "
            "the model or in a BatchNorm1d at its start"
        )
    return "subtract the mean of the training data from the input and divide by its standard deviation"


def _is_unscaled(note: dict[str, Any]) -> bool:
    low, high, mean, std = (float(note[name]) for name in ("min", "max", "mean", "std"))
    if not all(map(math.isfinite, (low, high, mean, std))):
        return False
    largest = max(abs(low), abs(high))
    if note.get("is_joined"):
        return largest > 1e4  # embeddings are among the numbers: only what no embedding is can be told
    if largest > 1e4 or (abs(mean) > 20 * std and abs(mean) > 1 and std > 0):
        return True
    return _is_image(note) and low >= 0 and 50 < high <= 255


def _is_image(note: dict[str, Any]) -> bool:
    """Return whether an input is an image, or the flat pixels of one: many dense numbers for each sample."""
    shape = note["shape"]
    if len(shape) > 3 and note["type"].startswith("Conv"):
        return True
    if len(shape) == 3:  # rows or patches of bytes
        return bool(note.get("is_whole")) and note["max"] > 200 and shape[1] * shape[2] >= 64
    return len(shape) == 2 and shape[1] >= 64 and float(note["mean"]) > 5


@rule(
    "D08",
    "input-scaled-twice",
    severity="warning",
    watches="images that enter the first convolution",
    threshold="all values between 0 and 0.02",
    silent="a scaled image reaches about 1",
    hint="ToTensor divides by 255 already: take the second division out",
    until=5,
    needs=("probe:stats", "note:first-input"),
)
def input_scaled_twice(case: Case) -> Iterator[Found]:
    """The images are scaled twice."""
    note = _confirmed(case, _is_tiny)
    if note is not None:
        evidence = {name: round_number(note[name]) for name in ("min", "max", "mean")}
        yield Found(int(note["step"]), site=note["site"], evidence={**evidence, "shape": note["shape"]})


def _is_tiny(note: dict[str, Any]) -> bool:
    is_picture = not note.get("is_joined") and len(note["shape"]) == 4 and note["shape"][1] in (1, 3, 4)
    return is_picture and note["min"] >= 0 and 0 < note["max"] < 0.02
