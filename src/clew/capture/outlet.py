"""Where the steps of a recording leave it: as records to the sink, and to whoever shows how far it has come."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Generic, TypeVar

from clew.capture.draft import Draft, find_kin, join
from clew.model.sink import StretchSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clew.capture.draft import Parts
    from clew.model.record import Fault, StepRecord, Stretch
    from clew.model.sink import Sink

Sender = TypeVar("Sender")


class Outlet(Generic[Sender]):
    """Makes records of what steps left; steps in a row that left the same rows, or none, go as one stretch."""

    def __init__(
        self, sink: Sink, on_step: Callable[[Sender, StepRecord | Stretch], None] | None = None
    ) -> None:
        self._sink = sink
        self._on_step = on_step
        self._put_stretch: Callable[[Stretch], None] | None = None
        if isinstance(sink, StretchSink) and sink.takes_stretches:
            self._put_stretch = sink.put_stretch

    def give(self, sender: Sender, backlog: Sequence[Parts], faults: tuple[Fault, ...]) -> None:
        """Send steps, and the faults with the first of them."""
        for _, group in groupby(backlog, find_kin):
            some = list(group)
            if len(some) > 1 and not faults and self._put_stretch is not None:
                stretch = join(some)
                if stretch is not None:
                    self._put_stretch(stretch)
                    self._tell(sender, stretch)
                    continue
            for parts in some:
                record = Draft(*parts).finish(faults)
                faults = ()
                self._sink.put(record)
                self._tell(sender, record)

    def _tell(self, sender: Sender, record: StepRecord | Stretch) -> None:
        if self._on_step is not None:
            self._on_step(sender, record)
