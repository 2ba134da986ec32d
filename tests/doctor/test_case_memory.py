"""A case keeps a bounded part of a long run, however its steps arrive."""

import numpy as np

from clew.doctor.case import Case
from clew.doctor.window import SERIES_LENGTH
from clew.model.record import Scalar, StepRecord, Stretch


def test_numbers_of_recorded_steps_alone_stay_bounded_among_stretches():
    nothing = np.zeros(0, np.int32)
    case = Case()
    for step in range(0, 100_000, 2):
        scalars = (Scalar("grad_norm", 1.0),)
        record = StepRecord(step, nothing, nothing, nothing, nothing, np.zeros((0, 14)), scalars=scalars)
        case.add(record)
        thin = np.array([step + 1])
        case.add_stretch(Stretch(step + 1, step + 1, {("loss", 0): (thin, np.ones(1))}))
    kept = case.scalar("grad_norm")
    assert len(kept) <= 5 * SERIES_LENGTH
    assert kept.steps[0] == 0 and kept.steps[-1] == 99_998
