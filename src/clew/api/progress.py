"""Running numbers of a recording: what the status line and the closing words show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.capture.clock import PHASES
from clew.model.mask import is_mask
from clew.model.record import Stretch
from clew.model.schema import KINDS, STAT_NAMES

if TYPE_CHECKING:
    from clew.capture.torch.recorder import Recorder
    from clew.model.record import StepRecord

_SMOOTH: Final = 0.9
_TIMES: Final = frozenset(f"time.{name}" for name in PHASES)
_DATA, _CLEW = "time.data", "time.clew"


class Progress:
    """Running numbers for the status line: speed, shares of time, the worst site so far."""

    def __init__(self) -> None:
        self.worst = ""
        self.measured = 0
        """How many steps have left statistics."""
        self._loss: float | None = None
        self._step = 0
        self._wall = self._data = self._cost = 0.0
        self._rate: float | None = None
        self._memory: float | None = None

    @property
    def cost_share(self) -> float | None:
        """Clew's own share of the time so far, against the plain run."""
        plain = self._wall - self._cost
        return self._cost / plain if plain > 0 else None

    def take(self, recorder: Recorder, record: StepRecord | Stretch) -> None:
        """Take note of a finished step, or of several."""
        if isinstance(record, Stretch):
            self._take_stretch(recorder, record)
            return
        wall = 0.0
        for name, value, _ in record.scalars:
            if name in _TIMES:
                wall += value
                if name == _DATA:
                    self._data += value
                elif name == _CLEW:
                    self._cost += value
            elif name == "memory.process":
                self._memory = value
        self._add_wall(wall, 1)
        self._loss = recorder.last_loss
        self._step = record.step
        self.measured += len(record) > 0
        if not self.worst:
            self.worst = _find_worst(recorder, record)

    def _take_stretch(self, recorder: Recorder, stretch: Stretch) -> None:
        sums = {
            name: float(values.sum()) for (name, _), (_, values) in stretch.columns.items() if name in _TIMES
        }
        self._data += sums.get(_DATA, 0.0)
        self._cost += sums.get(_CLEW, 0.0)
        self._add_wall(sum(sums.values()), stretch.steps)
        memory = stretch.columns.get(("memory.process", 0))
        if memory is not None:
            self._memory = float(memory[1][-1])
        self._loss, self._step = recorder.last_loss, stretch.last
        self.measured += stretch.steps if stretch.rows is not None else 0

    def _add_wall(self, seconds: float, steps: int) -> None:
        self._wall += seconds
        if seconds > 0:
            past = _SMOOTH**steps if self._rate is not None else 0.0
            self._rate = past * (self._rate or 0.0) + (1 - past) * steps / seconds

    def shown(self) -> dict[str, Any]:
        """Return what the status line shows."""
        return {
            "step": self._step,
            "steps_per_second": self._rate,
            "loss": self._loss,
            "worst_site": self.worst,
            "data_wait_share": self._data / self._wall if self._wall else None,
            "memory_bytes": self._memory,
            "cost_share": self.cost_share,
        }


def _find_worst(recorder: Recorder, record: StepRecord) -> str:
    """Return the first site with a NaN or an infinity in this step, in words."""
    if not len(record) or not record.has_bad:
        return ""
    for row in np.flatnonzero(record.values[:, 1:4].any(axis=1)).tolist():
        site, kind = recorder.sites[int(record.sites[row])], KINDS[int(record.kinds[row])]
        stats = dict(zip(STAT_NAMES, record.values[row].tolist(), strict=True))
        if not is_mask(kind, stats, site):
            return f"{site.name} ({'NaN' if stats['nan'] else 'Inf'} in {kind} at step {record.step})"
    return ""
