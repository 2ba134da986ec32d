"""Snapshots: every so many steps all that the next step depends on, and in between what the steps were given.

The state is copied into memory of our own and written by a thread. How often follows from what it costs. Batches are
kept by reference until they are written; one that the training changes in place makes the next ones be copied.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from clew.capture.beat import Shelf
from clew.capture.torch import snapshot_state as states
from clew.capture.torch.companions import Companions
from clew.capture.torch.leaves import list_leaves
from clew.capture.torch.randomness import RandomBytes, RandomMemory, RandomStates
from clew.capture.torch.snapshot_names import Suspended, pack_names
from clew.stats.readable import unheard
from clew.stats.rows import KERNEL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from clew.capture.settings import Settings
    from clew.capture.torch.optimizers import OptimizerLens
    from clew.capture.torch.patches import Patches
    from clew.capture.torch.recorder import Recorder

_SHARE: Final = 0.005
_SHARE_OF_BUDGET: Final = 1 / 6
"""Share of the time that snapshots may take, copying and writing together, and of a budget that is less than usual."""
_SHORTEST: Final = 10
_SHORTEST_SECONDS: Final = 4.0
"""Steps between two snapshots at least, and seconds from the second one on: so many are soon executed again."""
_WAITING: Final = 16
_LONGEST_WAITING: Final = 256
_PATIENCE: Final = 3
"""While clew has spent more than its budget a snapshot waits: it is asked for again after so many steps, for so many
periods."""
_BYTES_PER_SECOND: Final = 4_000_000
"""What snapshots, and likewise batches, may write on average: a disk is not for wearing out."""
_AHEAD: Final = 2
"""Batches that a framework may have fetched before the step begins that they are for."""
_MOST_EVENTS: Final = 16
_RANDOM_BYTES: Final = 10_000
_FLUSH_SECONDS: Final = 2.0
_DEAR_SECONDS: Final = 0.25
"""How often batches are written; where that is too dear, how often one asks again."""
_FLUSH_BYTES: Final = 8_000_000
_RING_BYTES: Final = 24_000_000
_STEPS_AFTER_TROUBLE: Final = 3
_BYTE_SECONDS: Final = 2.5e-9
_BASE_SECONDS: Final = 3e-3
_ENTRY_SECONDS: Final = 6e-5


class Folder(Protocol):
    """Where snapshots go."""

    def write_snapshot(self, step: int, files: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Write the state before a step."""

    def write_batches(self, steps: list[dict[str, Any]], tensors: Any) -> None:
        """Write what some steps in a row were given."""


class Writer(Protocol):
    """A thread that writes."""

    cpu_seconds: float
    stopped: str

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be written."""

    def submit(self, job: Callable[[Any], None]) -> None:
        """Have a job done."""

    def stop(self, reason: str) -> None:
        """Write nothing more."""

    def wait(self) -> None:
        """Return when everything is written."""

    def close(self) -> None:
        """Write what is waiting and end."""


class Given(NamedTuple):
    """One thing that a step was given: a loader's batch, the end of a loader, or the arguments of a root call."""

    kind: str
    value: Any = None
    name: str = ""
    random: RandomBytes | RandomMemory | None = None
    versions: list[int] = []  # noqa: RUF012 - never written
    size_bytes: int = 0

    def is_changed(self) -> bool:
        """Whether the training has written into it since."""
        return _weigh(self.value)[0] != self.versions


class Entry(NamedTuple):
    """What one step was given, in order."""

    step: int
    given: list[Given]
    is_whole: bool
    size_bytes: int
    """How much memory it holds on to."""


class SnapshotLens(Shelf):
    """Takes snapshots at the end of steps and keeps what the steps between them are given."""

    def __init__(
        self,
        recorder: Recorder,
        optimizers: OptimizerLens,
        writer: Writer,
        *,
        settings: Settings,
        limit_bytes: int,
    ) -> None:
        self.recorder = recorder
        self.optimizers = optimizers
        self.writer = writer
        self.every: int | None = None
        """Steps between two snapshots, as far as that is decided."""
        self.taken = 0
        self.off = ""
        """Why no snapshots are taken, if so."""
        self._is_one_of_many = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
        word, _, number = settings.snapshots.partition(":")
        self._fixed = int(number) if word == "every" else None
        budget = settings.budget if settings.every is None else None
        self._share = _SHARE if budget is None else min(_SHARE, _SHARE_OF_BUDGET * budget)
        self._limit = limit_bytes
        # Batches that are written together must leave room for others, or they would push themselves out.
        self.flush_bytes = min(_FLUSH_BYTES, limit_bytes // 4)
        self.ring_bytes = min(_RING_BYTES, limit_bytes // 2)
        self.keep_batches = settings.keep_batches if settings.data else 0
        self._companions = Companions()
        self._random, self._before = RandomStates(), RandomStates()
        self._staging: dict[str, torch.Tensor] = {}
        self._clear_shelf()
        self._asked = ""
        self._last = 0
        self._look_at = 0
        self._next = -1
        self._flushed_at = perf_counter()
        self._cost, self._size = 0.0, 0
        self._suspended = Suspended()

    def _clear_shelf(self) -> None:
        self.given: list[Given] = []
        """What the present step was given so far, and whether that is all."""
        self.is_whole = True
        self.entries: deque[Entry] = deque()
        self.pending_bytes = 0
        self.ahead: deque[Given] = deque(maxlen=_AHEAD)
        self.clones = False
        """Whether batches are copied, since the training writes into them."""
        self.is_dear = False
        """Whether writing them was too dear when last asked."""
        self.trouble_at = -1
        self.is_ending = False
        self.blocks: bytes | None = None
        """Where the random states lie in memory that a loader may draw from, if that is all there is to compare."""
        self.spare = self._before.python
        self.given_type, self.entry_type, self.memory_type = Given, Entry, RandomMemory

    @property
    def kept_bytes(self) -> int:
        """Bytes of the batches that are held in memory, which the training would have given back."""
        return self.pending_bytes

    def install(self, patches: Patches) -> None:
        """Begin to see schedulers and scalers; of batches the flight recorder's snapshots are told."""
        self._companions.install(patches)
        patches.listen(self.recorder.on_trouble, self._note_trouble)
        flight = self.recorder.flight
        flight.snapshots, flight.look_at = self, 0

    def ask_snapshot(self, reason: str) -> None:
        """Have the state after the present step kept, whatever it costs."""
        self._asked = reason or "asked for"
        self.recorder.flight.look_at = 0

    def close(self) -> None:
        """Write what is left of batches and wait for the thread."""
        if self.given:
            self.entries.append(self._make_entry(self.recorder.flight.ended + 1))
            self.given = []
        if not self.recorder.is_child():
            self._flush()
        self.writer.close()
        flight = self.recorder.flight
        self._staging, flight.snapshots, flight.look_at = {}, None, sys.maxsize

    def describe(self) -> list[str]:
        """Return what a reader should know, as sentences."""
        notes = [note for note in (self.off, self.writer.stopped) if note]
        return [f"snapshots: {note}" for note in notes]

    # ---------------------------------------------------------------- what steps are given

    def await_batch(self) -> None:
        """A loader is asked for a batch, and may draw random numbers for it."""
        if not self.keep_batches or self.off:
            return
        try:
            self._before.take()
            self.blocks = self._before.packed if self._before.is_fast else None
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._give_up(error)

    def add_batch(self, *batch: Any) -> None:
        """Keep what a loader has given, or that it has no more."""
        if not self.keep_batches or self.off:
            return
        try:
            self._random.take()
            random = None if self._random.is_same(self._before) else self._random.keep()
            given = Given("batch", batch[0]) if batch else Given("stop")
            with unheard():
                given = self._hold(given._replace(random=random))
            if batch:
                self.ahead.append(given)
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._give_up(error)

    def _peek(self) -> RandomBytes:
        self._random.take()
        return self._random.export()

    def _hold(self, given: Given) -> Given:
        """Keep what was given, and return how; a validation pass of a hundred batches is not worth it."""
        if len(self.given) >= _MOST_EVENTS:
            self.is_whole = False
            return given
        value = copy_tensors(given.value) if self.clones else given.value
        versions, size = _weigh(value)
        size += _RANDOM_BYTES if given.random is not None else 0
        given = given._replace(value=value, versions=versions, size_bytes=size)
        self.given.append(given)
        if not self.recorder.flight.has_loader:  # with a loader each end is told
            self.recorder.flight.look_at = 0
        return given

    def _take_calls(self) -> None:
        """Without a loader the arguments of root calls are all that is known of the data."""
        modules = self.recorder.registry.modules
        for module, args, kwargs in self.recorder.calls:
            entry = modules.get(id(module))
            if entry is not None:
                self._hold(Given("call", {"args": args, "kwargs": kwargs}, entry.name))

    # ---------------------------------------------------------------- the end of a step

    def end_step(self) -> None:
        """An optimizer has stepped: keep what the step was given, and the state when it is time."""
        recorder = self.recorder
        if self.off:
            recorder.flight.look_at = sys.maxsize
            return
        if recorder.asleep or self.is_ending:
            return
        self.is_ending = True  # with no call between test and setting, no other thread comes between
        try:
            step, flight = recorder.step, recorder.flight
            if step == flight.ended:
                flight.ends += 1
            else:
                flight.keep_pace(step)
                # Without a loader the script makes its data again; only calls right after a snapshot are repeated.
                has_given = self.given or flight.has_loader or (step == self._last and self.taken)
                if has_given and self.keep_batches:
                    self._close_entry(step, perf_counter())
            if (step >= self._look_at or self._asked or flight.ends > 1) and self._is_due(step + 1):
                with unheard():
                    self._take(step + 1)
            flight.look_at = self._last if self._last > step else self._look_at
        except Exception as error:  # noqa: BLE001 - ours to answer for
            self._give_up(error)
        finally:
            self.is_ending = False

    def _close_entry(self, step: int, now: float) -> None:
        if self.given and not self.clones:
            self.clones = any(given.is_changed() for given in self.given)
        if step == self._last and self.taken and not self.recorder.flight.has_loader:
            self._take_calls()
        if self.trouble_at < 0 or not self._is_frozen(step):
            entry = self._make_entry(step)
            self.entries.append(entry)
            self.pending_bytes += entry.size_bytes
        self.given, self.is_whole = [], True
        waited = now - self._flushed_at > _FLUSH_SECONDS
        is_due = waited or self.pending_bytes > self.flush_bytes
        self.is_dear = is_due and not self._is_cheap()
        if is_due and not self.is_dear:
            self._flush()
        self.stay_quiet(_DEAR_SECONDS if self.is_dear else self._flushed_at + _FLUSH_SECONDS - now)
        entries = self.entries
        while entries and (self.pending_bytes > self.ring_bytes or len(entries) > self.keep_batches):
            self.pending_bytes -= entries.popleft().size_bytes

    def _make_entry(self, step: int) -> Entry:
        return Entry(step, self.given, self.is_whole, sum(each.size_bytes for each in self.given))

    def _is_cheap(self) -> bool:
        """Whether writing every batch stays within the share; otherwise the last ones wait in memory."""
        if self.recorder.flight.has_loader is False or not self.entries:
            return False
        size = self.entries[-1].size_bytes
        seconds = max(_ENTRY_SECONDS + _BYTE_SECONDS * size, self._share * size / _BYTES_PER_SECOND)
        return seconds < self._share * self.recorder.flight.step_seconds or self.trouble_at >= 0

    def _flush(self) -> None:
        entries, self.entries, self.pending_bytes = list(self.entries), deque(), 0
        self._flushed_at = perf_counter()
        if entries:
            self.writer.submit(lambda folder: self._write_batches(folder, entries))

    def _write_batches(self, folder: Folder, entries: list[Entry]) -> None:
        """Run by the writing thread: tensors are read here, and one that has changed since is left out."""
        tensors: dict[str, torch.Tensor] = {}
        steps = []
        for entry in entries:
            given = [self._pack(each, f"{entry.step}.{i}", tensors) for i, each in enumerate(entry.given)]
            steps.append({"step": entry.step, "given": given, "whole": entry.is_whole})
        folder.write_batches(steps, states.to_arrays(tensors))

    def _pack(self, given: Given, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        data: dict[str, Any] = {"kind": given.kind}
        if given.kind == "call":
            data["site"] = given.name
        if given.random is not None:
            data["random"] = pack_random(given.random.export(), f"{name}.random", tensors)
        if given.value is None:
            return data
        if given.is_changed():
            self.clones = True
            data["changed"] = True
        else:
            data["value"] = states.pack(given.value, name, tensors)
        return data

    # ---------------------------------------------------------------- the state

    def _is_due(self, step: int) -> bool:
        if self._asked:
            return True
        if step == self._next and self.recorder.flight.ends > 1:
            return True  # a second optimizer has stepped: the state of a moment ago was not the last
        if self._is_frozen(step):
            return False
        if self._fixed is None and (self.writer.is_busy or not self.recorder.flight.step_seconds):
            return False  # the first step has no pace yet
        self.every = self._fixed or self._choose_period()
        left = self._last + self.every - step
        if self._is_one_of_many and not self._fixed:
            # A step of ranks is executed again from a state that all of them have: they agree without a word.
            self.every = _SHORTEST * (1 << max(0, (self.every - 1) // _SHORTEST).bit_length())
            left = -step % self.every
            self._look_at = step + left - 1
            return not left
        if left <= 0 and self._must_wait(left):
            self._look_at = step + self._count_waiting() - 1
            return False
        # What a step takes changes little by little: no need to ask before half of the way is gone.
        self._look_at = step + (left if self._fixed else left // 2) - 1
        return left <= 0

    def _must_wait(self, left: int) -> bool:
        """Whether the budget has to recover first; one that never does is passed over in the end."""
        schedule, every = self.recorder.schedule, self.every or 1
        return (
            self._fixed is None and schedule.every is None and schedule.bank < 0 and left > -_PATIENCE * every
        )

    def _count_waiting(self) -> int:
        """Return after how many steps the budget may have recovered, as far as one waits before asking again."""
        schedule, step_seconds = self.recorder.schedule, self.recorder.flight.step_seconds
        steps = -schedule.bank / max(schedule.share * step_seconds, 1e-9)
        return int(min(max(steps, _WAITING), _LONGEST_WAITING))

    def _is_frozen(self, step: int) -> bool:
        """After trouble nothing may push out the state from before it."""
        return 0 <= self.trouble_at < step - _STEPS_AFTER_TROUBLE

    def _choose_period(self) -> int:
        if self.every is None or not self.taken:
            with unheard():
                size = sum(_size(tensor) for _, tensor in states.name_tensors(self.recorder.registry))
            # Adam keeps two numbers for each weight; what it really costs is known after the first.
            self._size = 3 * size
            self._cost = _BASE_SECONDS + self._size * _BYTE_SECONDS
        step_seconds = max(self.recorder.flight.step_seconds, 1e-4)
        schedule = self.recorder.schedule
        # The step after a snapshot is recorded in full, which costs as well unless every step is.
        cost = self._cost + (schedule.cost if schedule.every != 1 else 0.0)
        seconds = max(cost / self._share, self._size / _BYTES_PER_SECOND)
        if self.taken > 1:
            seconds = max(seconds, _SHORTEST_SECONDS)
        return max(_SHORTEST, int(seconds / step_seconds) + 1)

    def _take(
        self,
        step: int,
        *,
        random: RandomBytes | None = None,
        buffers: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """Copy everything that a step depends on, and have it written; by default that is how things are now."""
        started, written = perf_counter(), self.writer.cpu_seconds
        sources, state = self._collect(random, buffers or {})
        size = sum(_size(tensor) for tensors in sources.values() for tensor in tensors.values())
        if size > self._limit // 2:
            self.off = (
                f"none were taken: one holds {size:,} bytes, and snapshots may take {self._limit:,} in all"
            )
            return
        if self._fixed is not None:
            self.writer.wait()  # who asks for every so many steps gets each of them, on a slow disk too
        elif self.writer.is_busy:
            self._staging = {}  # the thread still reads from what is there
        files = {name: self._stage(name, tensors) for name, tensors in sources.items()}
        state.update(
            reason=self._asked,
            threads=torch.get_num_threads(),
            has_data=bool(self.keep_batches),
        )
        self._asked, self._last, self._next = "", step, step
        # A replay from here begins with a step that can be compared in full.
        self.recorder.schedule.force(step, steps=1, is_probed=False)
        self.taken += 1
        if self._is_cheap():
            self._flush()
        self.writer.submit(
            lambda folder: folder.write_snapshot(
                step, {name: states.to_arrays(tensors) for name, tensors in files.items()}, state
            )
        )
        self.recorder.flight.rest()  # the time of a snapshot is none of a step
        copying = perf_counter() - started
        writing = written / (self.taken - 1) if self.taken > 1 else size * _BYTE_SECONDS
        self._cost, self._size = copying + writing, size

    def _collect(
        self, random: RandomBytes | None, buffers: dict[int, torch.Tensor]
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        named = states.name_tensors(self.recorder.registry)
        weights = {name: buffers.get(id(tensor), tensor) for name, tensor in named}
        moments: dict[str, torch.Tensor] = {}
        used = self.optimizers.list_used()
        state: dict[str, Any] = {
            "optimizers": [
                states.pack_optimizer(each, str(i), moments, registry=self.recorder.registry)
                for i, (each, _) in enumerate(used)
            ],
            "stepped": [index for index, (_, serial) in enumerate(used) if serial == self.recorder.serial],
            "schedulers": [states.describe_numbers(each) for each in self._companions.schedulers],
            "scalers": [states.describe_scaler(each) for each in self._companions.scalers],
            "modules": states.describe_modules(self.recorder.registry),
            "has_loader": self.recorder.flight.has_loader,
        }
        randoms: dict[str, torch.Tensor] = {}
        state["random"] = pack_random(random or self._peek(), "random", randoms)
        variables: dict[str, torch.Tensor] = {}
        if random is None:  # in the middle of a step the loop's variables are not those it began with
            state["names"], state["left_out"] = pack_names(
                self._suspended, self.recorder.registry, variables, with_tensors=bool(self.keep_batches)
            )
        found = {"weights": weights, "optimizer": moments, "random": randoms, "names": variables}
        if self.keep_batches and self.ahead:
            batches: dict[str, torch.Tensor] = {}
            state["ahead"] = [
                states.pack(each.value, str(index), batches) if not each.is_changed() else {"as": True}
                for index, each in enumerate(self.ahead)
            ]
            found["ahead"] = batches
        return found, state

    def _stage(self, group: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors into memory that is used again for the next snapshot."""
        staged = {}
        for name, tensor in tensors.items():
            known = self._staging.get(f"{group}/{name}")
            if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
                known = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._staging[f"{group}/{name}"] = known
            staged[name] = known
        if staged:
            with torch.no_grad():
                torch._foreach_copy_(list(staged.values()), [tensor.detach() for tensor in tensors.values()])
        return staged

    # ---------------------------------------------------------------- who else has state

    def _note_trouble(self, kind: str, _name: str) -> None:
        """Something is bad for the first time. Before the optimizer's turn the state the step began with is there."""
        if self.trouble_at >= 0 or self.off:
            return
        recorder = self.recorder
        self.trouble_at = recorder.step
        recorder.flight.look_at = 0
        if kind == "parameter" or not recorder.step:
            return
        random, buffers = recorder.flight.start_state()
        last = max((at for at, given in enumerate(self.given) if given.kind == "batch"), default=None)
        if last is not None:  # the step began when it had its batch
            self.given[last] = self.given[last]._replace(random=random)
        self._asked = f"{kind} went bad"
        self._take(recorder.step, random=random, buffers=buffers)

    def _give_up(self, error: Exception) -> None:
        self.off = f"clew failed to take one ({type(error).__name__}: {error})"
        self.recorder.guard.fault(error, "snapshot", step=self.recorder.step)


def pack_random(random: RandomBytes, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return random states as plain data; their words go into ``tensors``."""
    data: dict[str, Any] = {"gauss": random.gauss}
    for key in ("torch", "python", "numpy"):
        words = getattr(random, key)
        if words:
            data[key] = f"{name}.{key}"
            tensors[data[key]] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    return data


def copy_tensors(value: Any) -> Any:
    """Return a nest of containers with copies of its tensors, which keep their strides."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if type(value) in (list, tuple):
        return type(value)(copy_tensors(part) for part in value)
    if type(value) is dict:
        return {key: copy_tensors(part) for key, part in value.items()}
    return value


def _weigh(value: Any) -> tuple[list[int], int]:
    """Return the versions of the tensors inside a value, by which one that was written to is told, and their bytes."""
    found: tuple[list[int], int] | None = KERNEL.weigh(value) if KERNEL is not None else None
    if found is not None:
        return found
    leaves = list_leaves(value)
    return [_version(leaf) for leaf in leaves], sum(_size(leaf) for leaf in leaves)


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode has none
        return 0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
