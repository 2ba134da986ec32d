"""NaN and infinity: where the first one came from, by the replayed step where there is one, else by the rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from clew.doctor.measure import HALF, skipped_steps
from clew.doctor.rule import Found, rule
from clew.model.mask import is_mask
from clew.model.schema import STAT_INDEX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import BadRow, Case

_PHASES: Final = {
    "batch": "data", "output": "forward", "loss": "forward", "buffer": "forward", "input": "forward",
    "grad_output": "backward", "grad": "backward", "param": "parameter", "update": "optimizer", "state": "optimizer",
}  # fmt: skip

_CONVERSIONS: Final = ("to", "_to_copy", "half", "bfloat16", "type", "type_as", "copy_")
_LARGEST_FLOAT: Final = 3.4e38

_AFTERMATH: Final = ("M11", "M12", "M20", "M21", "N06", "N08", "O09", "O11", "O12", "D06", "V0*")
"""What a training shows after a NaN has gone through it."""


class Trouble(NamedTuple):
    """The first bad value of a run that did harm: to a loss, a gradient or a weight."""

    step: int
    phase: str
    site: str = ""
    source: str = ""
    hint: str = ""
    op: str = ""
    is_half: bool = False
    is_born: bool = False
    """Whether a replay has seen the operation make it out of finite numbers."""
    evidence: dict[str, Any] = {}  # noqa: RUF012 - never written to
    given: dict[str, Any] = {}  # noqa: RUF012 - never written to
    """The operand that was bad before anything was computed with it."""


def find_trouble(case: Case) -> Trouble | None:
    """Return the first harmful NaN or infinity of a run; legal ones (masks, a scaler's overflow) are not."""
    found: Trouble | None = case.remember("trouble", _find_trouble)
    return found


def _find_trouble(case: Case) -> Trouble | None:
    # Live, a verdict is there before the records of its step and of those before it: it waits for them.
    known = (each for each in case.verdicts if each["step"] <= case.step)
    verdict = next((each for each in known if each.get("found") and each.get("phase")), None)
    step = _find_harm(case)
    if verdict is not None and (step is None or verdict["step"] <= step):
        return _from_verdict(verdict)
    return None if step is None else _from_rows(case, step)


def _find_harm(case: Case) -> int | None:
    """Return the first step in which a loss, a gradient, an update or a weight went bad."""
    steps = [
        int(series.steps[~np.isfinite(series.values)][0])
        for _, series in case.named("loss")
        if not np.isfinite(series.values).all()
    ]
    # A scaler looks for the largest scale by trying: infinite gradients are how it finds out.
    scaled = set(case.scalar("scaler.scale").steps.tolist()) | skipped_steps(case)
    harmful = ("param", "update", "grad")
    rows = [
        row.step
        for row in case.bad
        if row.kind in harmful and (row.kind != "grad" or row.step not in scaled) and not _is_mask(case, row)
    ]
    return min([*steps, *rows], default=None)


def _from_verdict(verdict: dict[str, Any]) -> Trouble:
    source = verdict.get("source") or {}
    inputs = verdict.get("inputs") or []
    values = [element.get("value") for element in verdict.get("elements") or ()]
    evidence: dict[str, Any] = {"op": verdict["op"]} if verdict.get("op") else {}
    for number, given in enumerate(inputs[:3]):
        evidence[f"input_{number}"] = _describe(given)
    if verdict.get("sample") is not None:
        evidence["sample"] = verdict["sample"]
    if verdict.get("symptom"):
        evidence["seen_in"] = verdict["symptom"]
    is_inf = any(isinstance(value, (int, float)) and math.isinf(value) for value in values)
    # A user's own optimizer computes like a model does: what it spoils first tells it apart.
    is_update = verdict["phase"] == "forward" and str(verdict.get("symptom", "")).startswith("parameter")
    # An operand that nothing has computed and that is bad already was given so: a target, a weight of a sample.
    given_bad = [each for each in inputs if each.get("nan") or each.get("inf")]
    is_given = verdict["phase"] == "forward" and any(each.get("role", "computed") == "" for each in given_bad)
    return Trouble(
        step=verdict["step"],
        phase="optimizer" if is_update else "data" if is_given else verdict["phase"],
        site=verdict.get("site", ""),
        source=f"{source['file']}:{source['line']}" if source.get("file") else "",
        hint=verdict.get("hint", ""),
        op=verdict.get("op", ""),
        is_born=bool(verdict.get("op")) and not any(given.get("nan") or given.get("inf") for given in inputs),
        is_half=is_inf and (any(given.get("dtype") in HALF for given in inputs) or _is_narrowed(verdict)),
        evidence=evidence,
        given=next(iter(given_bad), {}),
    )


def _is_narrowed(verdict: dict[str, Any]) -> bool:
    """Return whether a mere conversion made an infinity of numbers that float32 holds: the result is a half."""
    given = [number for each in verdict["elements"] for number in each.get("inputs") or ()]
    fits = [isinstance(number, (int, float)) and abs(number) < _LARGEST_FLOAT for number in given]
    return verdict.get("op") in _CONVERSIONS and bool(fits) and all(fits)


def _describe(given: dict[str, Any]) -> str:
    bad = "".join(f", {given[key]} {key}" for key in ("nan", "inf") if given.get(key))
    shape = "×".join(map(str, given.get("shape", ())))
    return f"{given.get('dtype', '')}[{shape}] from {given.get('min'):.4g} to {given.get('max'):.4g}{bad}"


def _from_rows(case: Case, step: int) -> Trouble:
    rows = [row for row in case.bad if row.step == step and row.mode == "train" and not _is_mask(case, row)]
    first = next(iter(rows), None)
    already = next((row for row in rows if row.kind == "param"), None)
    if first is not None and first.kind == "output" and already is not None:
        first = already  # the weights were measured after the outputs they spoiled
    loss_is_bad = any(
        not np.isfinite(series.values[series.steps == step]).all() for _, series in case.named("loss")
    )
    if first is None or (loss_is_bad and _PHASES[first.kind] in ("backward", "optimizer")):
        return Trouble(step, "forward", evidence={"seen_in": "loss"})
    site = case.sites.get(first.site)
    counts = {name: int(first.values[STAT_INDEX[name]]) for name in ("nan", "pos_inf", "neg_inf", "count")}
    inf = counts["pos_inf"] + counts["neg_inf"]
    return Trouble(
        step,
        _PHASES[first.kind],
        site=case.name(first.site),
        is_half=first.kind == "output" and inf > 0 and site is not None and site.dtype in HALF,
        evidence={"nan": counts["nan"], "inf": inf, "of": counts["count"], "kind": first.kind},
    )


def _is_mask(case: Case, row: BadRow) -> bool:
    stats = {name: row.values[STAT_INDEX[name]] for name in ("count", "zero", "nan", "pos_inf", "neg_inf")}
    return is_mask(row.kind, stats, case.sites.get(row.site))


@rule(
    "D01",
    "nonfinite-batch",
    severity="error",
    watches="batches, and the replayed step",
    threshold="a NaN or infinity in a batch that reaches the loss, a gradient or a weight",
    silent="additive masks of 0 and -inf are legal, and so is a NaN that the model itself takes out",
    hint="find the sample in the data, drop or impute it, and check the loader's transforms",
    explains=("N*", "O08", *_AFTERMATH),
)
def nonfinite_batch(case: Case) -> Iterator[Found]:
    """A batch came in with NaN or infinity."""
    trouble = find_trouble(case)
    if trouble is None:
        return
    bad = next(
        (
            row
            for row in case.bad
            if row.kind == "batch" and row.step <= trouble.step and not _is_mask(case, row)
        ),
        None,
    )
    if trouble.phase != "data" and (trouble.is_born or bad is None or bad.step != trouble.step):
        return  # a replay that names the operation has looked further back than the model's inputs
    evidence = {"seen_in": trouble.evidence["seen_in"]} if "seen_in" in trouble.evidence else {}
    site = trouble.site
    if bad is not None:
        site = case.name(bad.site)
        infinite = int(bad.values[STAT_INDEX["pos_inf"]] + bad.values[STAT_INDEX["neg_inf"]])
        counts = {"nan": int(bad.values[STAT_INDEX["nan"]]), "inf": infinite}
        evidence |= {name: count for name, count in counts.items() if count}
        evidence["of"] = int(bad.values[STAT_INDEX["count"]])
    elif trouble.given:
        evidence |= {name: trouble.given[name] for name in ("nan", "inf") if trouble.given.get(name)}
        evidence["shape"] = list(trouble.given.get("shape", ()))
    place = _locate(case, bad, trouble)
    yield Found(
        trouble.step, site=site, evidence=evidence | place, source=trouble.source, hint=_advise(place)
    )


def _locate(case: Case, bad: BadRow | None, trouble: Trouble) -> dict[str, Any]:
    """Return what is known of the batch: the sample in it, its place in the loader, the indices of its samples."""
    found: dict[str, Any] = {}
    if "sample" in trouble.evidence:
        found["samples"] = [trouble.evidence["sample"]]
    for note in case.noted("bad-batch"):
        if note["step"] == trouble.step:
            found["samples"] = note["samples"]
    for step, batch in case.batches:
        if step == trouble.step and (bad is None or batch.leaf == case.name(bad.site)):
            found["batch"] = batch.position if batch.position >= 0 else None
            found["indices"] = [
                batch.indices[at] for at in found.get("samples", ()) if at < len(batch.indices)
            ]
    return {key: value for key, value in found.items() if value not in (None, [])}


def _advise(place: dict[str, Any]) -> str:
    """Return what to do, with the sample by name where it is known."""
    if not place.get("samples"):
        return ""
    indices = place.get("indices")
    named = f", item {indices[0]} of the data set" if indices else ""
    return (
        f"drop or impute sample {place['samples'][0]} of this batch{named}, and check the loader's transforms"
    )


@rule(
    "N01",
    "nonfinite-forward",
    severity="error",
    watches="outputs, loss, and the replayed step",
    threshold="a NaN or infinity born in the forward pass from finite numbers, that reaches the loss or a gradient",
    silent="masked scores of -inf do no harm and are not counted",
    hint="look at the range of what goes into the operation: clamp it, add an epsilon, or lower the learning rate",
    explains=_AFTERMATH,
)
def nonfinite_forward(case: Case) -> Iterator[Found]:
    """NaN or infinity was born in the forward pass."""
    yield from _born(case, "forward", "the forward pass")


@rule(
    "N02",
    "nonfinite-backward",
    severity="error",
    watches="gradients while the loss is finite, and the replayed step",
    threshold="a NaN or infinity born in backward, without a GradScaler",
    silent="infinite gradients under a GradScaler are how it finds its scale",
    hint="the derivative does not exist there: add an epsilon inside sqrt or norm, mask the input, not the output",
    explains=_AFTERMATH,
)
def nonfinite_backward(case: Case) -> Iterator[Found]:
    """NaN or infinity was born in the backward pass."""
    yield from _born(case, "backward", "the backward pass")


def _born(case: Case, phase: str, words: str) -> Iterator[Found]:
    trouble = find_trouble(case)
    if trouble is None or trouble.phase != phase:
        return
    is_given = any(
        row.kind == "batch" and row.step == trouble.step and not _is_mask(case, row) for row in case.bad
    )
    if is_given and not trouble.is_born:
        return
    title = f"{trouble.op} made NaN or infinity in {words}" if trouble.op else ""
    yield Found(
        trouble.step,
        site=trouble.site,
        evidence=trouble.evidence,
        source=trouble.source,
        hint=trouble.hint,
        title=title,
    )


@rule(
    "N03",
    "nonfinite-parameter",
    severity="error",
    watches="weights and updates while outputs and gradients are finite, and the replayed step",
    threshold="a weight that the optimizer's step made NaN or infinite, or that was so before training",
    silent="no healthy weight is NaN",
    hint="look at the optimizer's numbers (eps, betas, learning rate) and at how this weight was initialised",
    explains=_AFTERMATH,
)
def nonfinite_parameter(case: Case) -> Iterator[Found]:
    """A weight turned NaN or infinite in the optimizer's step, or was so from the start."""
    trouble = find_trouble(case)
    if trouble is None or trouble.phase not in ("optimizer", "parameter"):
        return
    title = "a weight was NaN or infinite already when the step began" if trouble.phase == "parameter" else ""
    yield Found(
        trouble.step,
        site=trouble.site,
        evidence=trouble.evidence,
        source=trouble.source,
        hint=trouble.hint,
        title=title,
    )


@rule(
    "N07",
    "half-overflow",
    severity="error",
    watches="the first bad value, where it is of float16 or bfloat16",
    threshold="infinity born in a half-precision operation from finite inputs in the forward pass",
    silent="overflow in backward under a GradScaler is not counted",
    hint="run this operation in float32 (autocast(enabled=False), .float()), use bfloat16, or scale its input down",
    explains=("N01", "N02", "N03", "N04", "N09"),
)
def half_overflow(case: Case) -> Iterator[Found]:
    """A result went beyond the range of half precision."""
    trouble = find_trouble(case)
    if trouble is not None and trouble.is_half and trouble.phase == "forward":
        yield Found(trouble.step, site=trouble.site, evidence=trouble.evidence, source=trouble.source)


@rule(
    "N04",
    "scaler-skips-every-step",
    severity="error",
    watches="scaler.skipped and scaler.scale",
    threshold="15 skipped steps in a row, or a scale below 0.001",
    silent="a scaler skips a few steps while it finds its scale",
    hint="the gradients are infinite at any scale: find the infinity (clew why), or use bfloat16 without a scaler",
    needs=("scalar:scaler.skipped",),
    explains=("N01", "N02", "M20", "N08", "O09", "O11", "V02", "D06"),
)
def scaler_skips_every_step(case: Case) -> Iterator[Found]:
    """GradScaler leaves out step after step."""
    skipped = case.scalar("scaler.skipped")
    row = 0
    for step, value in zip(skipped.steps.tolist(), skipped.values.tolist(), strict=True):
        row = row + 1 if value else 0
        if row == 15:
            yield Found(
                step - 14,
                evidence={"skipped_in_a_row": row, "scale": float(case.scalar("scaler.scale").values[-1])},
            )
            return
    scale = case.scalar("scaler.scale")
    low = scale.values < 1e-3
    if low.any():
        yield Found(int(scale.steps[low][0]), evidence={"scale": float(scale.values[low][0])})


@rule(
    "N09",
    "underflow",
    severity="warning",
    watches="gradients in float16, without a GradScaler",
    threshold="most of a float16 gradient is exactly zero and the rest is below the smallest normal number",
    silent="with a scaler or in bfloat16 gradients do not underflow",
    hint="use torch.amp.GradScaler, or bfloat16",
    until=20,
    needs=("kind:grad_output",),
    explains=("O09", "O10", "O11", "V02", "D06", "N08"),
)
def underflow(case: Case) -> Iterator[Found]:
    """Gradients are flushed to zero in half precision."""
    if "scaler.scale" in case.scalars or all(site.dtype != "float16" for site in case.sites.values()):
        return
    outputs = case.by_site("output", first=20)
    for number, rows in case.by_site("grad_output", first=20).items():
        site = case.sites.get(number)
        if site is None or site.dtype != "float16" or len(rows) < 5:
            continue
        zero = rows.stat("zero") / np.maximum(rows.stat("count"), 1)
        flushed = (zero > 0.5) & (rows.stat("abs_max") < 6.2e-5)
        # After a ReLU or a mask most gradients are zero by right: only where the output itself is not.
        silent = outputs.get(number)
        dense = (
            silent is None
            or float(np.median(silent.stat("zero") / np.maximum(silent.stat("count"), 1))) < 0.3
        )
        if dense and flushed.mean() > 0.8:
            yield Found(
                int(rows.steps[0]),
                site=case.name(number),
                evidence={
                    "zero_share": float(np.median(zero)),
                    "abs_max": float(np.median(rows.stat("abs_max"))),
                },
            )
            return
