"""Small runs, written by the real writer from records made up here: the same bytes of numbers every time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from clew.model.record import Fault, RunInfo, Scalar, Site, StepRecord
from clew.model.schema import KIND_INDEX, STAT_NAMES
from clew.store.writer import Writer

SITES = [
    Site(0, "(net)", "module", "Net", -1, (8, 1), "float32", 4, root="net"),
    Site(1, "fc1", "module", "torch.nn.modules.linear.Linear", 0, (8, 16), "float32", 1, root="net"),
    Site(2, "relu", "module", "torch.nn.modules.activation.ReLU", 0, (8, 16), "float32", 2, root="net"),
    Site(3, "fc2", "module", "torch.nn.modules.linear.Linear", 0, (8, 1), "float32", 3, root="net"),
    Site(4, "fc1.weight", "parameter", "float32", 1, (16, 4), "float32", 5, root="net", trainable=True),
    Site(5, "fc2.weight", "parameter", "float32", 3, (1, 16), "float32", 6, root="net", trainable=True),
    Site(6, "batch.0", "batch", "float32", -1, (8, 4), "float32", 0, root="net"),
]

ROWS = [
    (6, "batch"),
    (1, "output"),
    (2, "output"),
    (3, "output"),
    (0, "output"),
    (3, "grad_output"),
    (2, "grad_output"),
    (1, "grad_output"),
    (4, "param"),
    (5, "param"),
    (4, "grad"),
    (5, "grad"),
    (4, "update"),
    (5, "update"),
]


def make_row(scale, *, zero=0, nan=0, count=128):
    """Return one row of statistics of a made-up tensor with a largest magnitude of ``scale``."""
    finite = count - nan
    row = dict.fromkeys(STAT_NAMES, math.nan if not finite else 0.0)
    row.update(count=count, nan=nan, pos_inf=0, neg_inf=0, zero=zero)
    row.update(negative=(finite - zero) // 2, positive=finite - zero - (finite - zero) // 2)
    if finite:
        row.update(min=-scale, max=scale, mean=scale / 100, std=scale / 2, abs_mean=scale / 3)
        row.update(abs_max=scale, l2=scale * math.sqrt(count) / 2)
    return [row[name] for name in STAT_NAMES]


def make_record(step, rows, loss, *, recorded=True, faults=()):
    """Return the record of a step: ``rows`` maps (site, kind) to the arguments of ``make_row``."""
    keys = ROWS if recorded else []
    values = np.array([make_row(**rows.get(key, {"scale": 0.5})) for key in keys], float)
    times = {"data": 1e-4, "forward": 1e-3, "backward": 2e-3, "optimizer": 5e-4, "rest": 3e-4, "clew": 1e-4}
    scalars = [Scalar(f"time.{phase}", seconds) for phase, seconds in times.items()]
    scalars += [Scalar("loss", loss), Scalar("lr", 0.1), Scalar("clew.recorded", float(recorded))]
    scalars += [Scalar("memory.process", 4e8), Scalar("memory.process_peak", 5e8)] if step % 10 == 0 else []
    return StepRecord(
        step=step,
        sites=np.array([site for site, _ in keys], np.int32),
        kinds=np.array([KIND_INDEX[kind] for _, kind in keys], np.int8),
        ordinals=np.zeros(len(keys), np.int16),
        modes=np.zeros(len(keys), np.int8),
        values=values.reshape(-1, len(STAT_NAMES)),
        scalars=tuple(scalars),
        faults=tuple(faults),
    )


def write_run(root, name, records, *, state="complete", started="2026-11-15T14:25:01.000+00:00", **info):
    """Write a run of these records and return its folder."""
    given = {
        "command": ["train.py", "--lr", "0.1"],
        "started": started,
        "ended": started.replace("14:25:01", "14:26:31"),
        "python": "3.11.7",
        "torch": "2.13.0",
        "git": {"commit": "0123456789abcdef", "branch": "main", "dirty": True},
        **info,
    }
    writer = Writer(root / name, RunInfo(name, **given))
    writer.add_sites(SITES)
    for record in records:
        writer.put(record)
    writer.close(state, 0 if state == "complete" else 1)
    return root / name


def healthy_records(steps=40):
    """Return a training that goes well, every step of it recorded."""
    return [make_record(step, {}, 2.0 * math.exp(-step / 15)) for step in range(steps)]


def sick_records():
    """Return a training in which each kind of trouble happens at a place of its own."""
    calm = {(2, "output"): {"scale": 0.5, "zero": 127}, (0, "output"): {"scale": 0.0, "zero": 128}}
    records = []
    for step in range(60):
        rows = dict(calm)
        rows[4, "param"] = {"scale": 0.5 * math.exp(step / 5)}
        loss = 1.0 + math.exp(step / 6) / 100
        if step >= 50:
            rows[3, "grad_output"] = {"scale": 1.0, "nan": 128}
            loss = math.nan
        fault = [Fault(step, "fc2", "ValueError: an odd tensor")] if step == 7 else []
        records.append(make_record(step, rows, loss, recorded=step < 20 or step % 5 == 0, faults=fault))
    return records


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return a folder with a healthy and a sick run; nobody may change it."""
    root = tmp_path_factory.mktemp("cli") / "runs"
    root.mkdir()
    write_run(root, "20261115-142501-fine", healthy_records())
    write_run(
        root,
        "20261115-152501-broken",
        sick_records(),
        state="died",
        started="2026-11-15T15:25:01.000+00:00",
        ended="2026-11-15T15:27:31.000+00:00",
        notes=["thinned: 28 of 60 steps recorded in full (budget 3%)", "ended by RuntimeError: boom"],
    )
    return root


@pytest.fixture
def own_runs(tmp_path):
    """Return a folder with two runs that a test may delete."""
    root = tmp_path / "runs"
    root.mkdir()
    write_run(root, "a-first", healthy_records(3))
    write_run(root, "b-second", healthy_records(3))
    return root
