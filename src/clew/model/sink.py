"""Where records go. Capture knows this protocol and nothing else of disk, rules or pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clew.model.record import RunInfo, Site, StepRecord, Stretch


class Sink(Protocol):
    """Receives a run as it happens. Calls come from one thread at a time and must not raise for a full disk.

    One that is a ``StretchSink`` as well, and says so, gets steps that are alike in stretches.
    """

    def add_sites(self, sites: Iterable[Site]) -> None:
        """Take new sites, or newer versions of known ones (same id)."""

    def put(self, record: StepRecord) -> None:
        """Take the record of one finished step."""

    def update_info(self, info: RunInfo) -> None:
        """Take provenance that became known after the start."""

    def close(self, state: str, exit_code: int | None = None) -> None:
        """End the run: ``complete`` or ``died``."""


@runtime_checkable
class StretchSink(Protocol):
    """Takes many steps at once."""

    @property
    def takes_stretches(self) -> bool:
        """Whether it does, this time."""

    def put_stretch(self, stretch: Stretch) -> None:
        """Take steps in a row."""


class Annex(Protocol):
    """Receives what is no number: events and files that belong to a step."""

    def add_note(self, step: int, kind: str, data: dict[str, Any]) -> None:
        """Take something that happened, as data that fits JSON."""

    def add_media(self, step: int, name: str, data: bytes, suffix: str) -> None:
        """Take a picture or another file; the suffix says what it is."""


class Tee:
    """One sink that feeds several, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = sinks
        self._able = [sink for sink in sinks if isinstance(sink, StretchSink)]

    def add_sites(self, sites: Iterable[Site]) -> None:
        """Pass the sites on to each sink."""
        known = tuple(sites)
        for sink in self.sinks:
            sink.add_sites(known)

    def put(self, record: StepRecord) -> None:
        """Pass the record on to each sink."""
        for sink in self.sinks:
            sink.put(record)

    @property
    def takes_stretches(self) -> bool:
        """Whether every sink does."""
        return len(self._able) == len(self.sinks) and all(sink.takes_stretches for sink in self._able)

    def put_stretch(self, stretch: Stretch) -> None:
        """Pass the steps on to each sink."""
        for sink in self._able:
            sink.put_stretch(stretch)

    def update_info(self, info: RunInfo) -> None:
        """Pass the provenance on to each sink."""
        for sink in self.sinks:
            sink.update_info(info)

    def close(self, state: str, exit_code: int | None = None) -> None:
        """Close each sink, the last one too when an earlier one fails."""
        failures = []
        for sink in self.sinks:
            try:
                sink.close(state, exit_code)
            except Exception as error:  # noqa: BLE001 - every sink must get its close
                failures.append(error)
        if failures:
            raise failures[0]
