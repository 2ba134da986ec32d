"""Made-up runs: a small net whose records are exact statistics of tensors one can make again. No torch needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.model.record import Batch, RunInfo, Scalar, Site, StepRecord
from clew.model.schema import KIND_INDEX
from clew.stats import reference
from clew.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

SHAPES = {
    "fc1": (8, 6),
    "fc1.weight": (6, 4),
    "fc1.bias": (6,),
    "fc2": (8, 3),
    "fc2.weight": (3, 6),
    "fc2.bias": (3,),
}

ROWS = (
    ("fc1", "output"),
    ("fc2", "output"),
    ("fc2", "grad_output"),
    ("fc1", "grad_output"),
    *((name, kind) for kind in ("param", "grad") for name in SHAPES if "." in name),
)
"""Site and kind of each row of a step, in order of execution."""


def make_sites() -> list[Site]:
    """Return the sites of the small net: two linear modules and their parameters."""
    names = list(SHAPES)
    sites = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        parent, _, leaf = name.rpartition(".")
        role = "parameter" if leaf in ("weight", "bias") else "module"
        kind = "float32" if role == "parameter" else "torch.nn.modules.linear.Linear"
        above = names.index(parent) if parent else -1
        sites.append(
            Site(number, name, role, kind, above, shape, "float32", number, trainable=role == "parameter")
        )
    return sites


def make_tensor(step: int, site: str, kind: str, *, rank: int = 0) -> NDArray[np.float32]:
    """Return the tensor that a row of the made-up run measured."""
    rng = np.random.default_rng([step, list(SHAPES).index(site), KIND_INDEX[kind], rank])
    return rng.standard_normal(SHAPES[site]).astype(np.float32)


def make_record(
    step: int, *, rank: int = 0, extras: bool = False, broken: Iterable[tuple[str, str]] = ()
) -> StepRecord:
    """Return the record of one step; ``extras`` adds hashes and histograms, ``broken`` rows hold a NaN."""
    tensors = [make_tensor(step, site, kind, rank=rank) for site, kind in ROWS]
    for row in broken:
        tensors[ROWS.index(row)].flat[0] = np.nan
    names = list(SHAPES)
    return StepRecord(
        step,
        np.array([names.index(site) for site, _ in ROWS], np.int32),
        np.array([KIND_INDEX[kind] for _, kind in ROWS], np.int8),
        np.zeros(len(ROWS), np.int16),
        np.zeros(len(ROWS), np.int8),
        np.stack([reference.summarise(tensor) for tensor in tensors]),
        np.array([reference.fingerprint(tensor) for tensor in tensors], np.uint64) if extras else None,
        np.stack([reference.histogram(tensor) for tensor in tensors]) if extras else None,
        (Scalar("loss", 1.0 / (step + 1)), Scalar("lr", 0.1), Scalar("lr", 0.01, ordinal=1)),
        (Batch("x", (8, 4), "float32", step + 1, loader="train", position=step, indices=(step, step + 1)),),
    )


def make_run(
    folder: Path | str,
    *,
    steps: int = 10,
    rank: int = 0,
    state: str = "complete",
    info: Any = None,
    **record: Any,
) -> Path:
    """Write a made-up run and return its folder; further arguments go to ``make_record``."""
    folder = Path(folder)
    writer = Writer(folder, info or RunInfo(folder.name, started="2026-01-01T00:00:00+0000", rank=rank))
    writer.add_sites(make_sites())
    for step in range(steps):
        writer.put(make_record(step, rank=rank, **record))
    writer.close(state)
    return folder
