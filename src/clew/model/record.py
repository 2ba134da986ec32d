"""What one step of training leaves behind, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Steps = NDArray[np.int64]
    Values = NDArray[np.float64]
    Column = tuple[Steps, Values]


@dataclass(frozen=True, slots=True)
class Where:
    """The join key of every table, finding and URL."""

    run: str
    step: int
    site: str = ""
    kind: str = ""
    rank: int = 0
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the model: a module, one leaf of its output, a parameter, a buffer or a batch leaf.

    ``role`` is one of ``module leaf parameter buffer batch loader loss``; ``type`` is the class name for a module
    (``torch.nn.modules.linear.Linear``) and the dtype for a tensor. ``order`` is the position of the first
    execution, or -1 while it has not run. ``shape`` is the last shape seen. ``args`` are the plain attributes of a
    module (``eps=1e-05; elementwise_affine=True``), as they were when it was first seen.
    """

    id: int
    name: str
    role: str
    type: str = ""
    parent: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""
    order: int = -1
    source: str = ""
    root: str = ""
    trainable: bool = False
    args: str = ""


SEED_AT_START: Final = "torch_at_start"
"""Torch's seed when the recording began: one that torch drew by itself, unless the script had seeded it already."""

new_tuple: Final = tuple.__new__
"""Makes a named tuple without running Python, as the class's own way of making one does."""


class Scalar(NamedTuple):
    """One number of a step: ``loss``, ``lr``, ``time.forward`` …; ordinal tells several of one name apart."""

    name: str
    value: float
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """One tensor of the inputs of a root call, and where it came from as far as that is known."""

    leaf: str
    shape: tuple[int, ...]
    dtype: str
    fingerprint: int
    ordinal: int = 0
    mode: int = 0
    loader: str = ""
    position: int = -1
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong inside clew itself; training went on."""

    step: int
    where: str
    error: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything measured in one step, rows in order of execution (the row number is the sequence number).

    ``sites``, ``kinds``, ``ordinals``, ``modes``: one integer per row. ``values``: float64, one row of
    ``STAT_NAMES`` each. ``hashes``: uint64 or None. ``hists``: uint32 of ``HIST_BINS`` or None. The sender
    never touches the arrays again; the integer ones may be shared between records, so nobody writes into them.
    """

    step: int
    sites: NDArray[np.int32]
    kinds: NDArray[np.int8]
    ordinals: NDArray[np.int16]
    modes: NDArray[np.int8]
    values: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None = None
    hists: NDArray[np.uint32] | None = None
    scalars: tuple[Scalar, ...] = ()
    batches: tuple[Batch, ...] = ()
    faults: tuple[Fault, ...] = ()
    has_bad: bool = True
    """Whether some row may hold a NaN or an infinity; False where that was looked at."""

    def __len__(self) -> int:
        return len(self.sites)


@dataclass(frozen=True, slots=True)
class StretchRows:
    """The rows of several steps that left the same ones, none with a NaN or an infinity.

    ``sites``, ``kinds``, ``ordinals``, ``modes``: one integer per row, the same in every step. ``values``, ``hashes``,
    ``hists``: as in a ``StepRecord``, with the steps as the first axis.
    """

    sites: NDArray[np.int32]
    kinds: NDArray[np.int8]
    ordinals: NDArray[np.int16]
    modes: NDArray[np.int8]
    values: NDArray[np.float64]
    hashes: NDArray[np.uint64] | None = None
    hists: NDArray[np.uint32] | None = None

    @property
    def nbytes(self) -> int:
        """How much memory the numbers take, histograms included."""
        return int(self.values.nbytes) + (0 if self.hists is None else int(self.hists.nbytes))

    def take(self, which: slice) -> StretchRows:
        """Return the rows of some of the steps."""
        return replace(
            self,
            values=self.values[which],
            hashes=None if self.hashes is None else self.hashes[which],
            hists=None if self.hists is None else self.hists[which],
        )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in a row, column by column: a long run mostly consists of such, and a record of each would cost more.

    ``columns``: by name and ordinal, the steps that have the number, in order, and the number of each of these.
    ``rows``: None where only numbers were taken.
    """

    first: int
    last: int
    columns: dict[tuple[str, int], Column]
    rows: StretchRows | None = None

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return self.last - self.first + 1

    def split(self, at: int) -> tuple[Stretch, Stretch]:
        """Return the steps before one, and those from it on."""
        before, after = {}, {}
        for key, (steps, values) in self.columns.items():
            here = int(steps.searchsorted(at))
            if here:
                before[key] = (steps[:here], values[:here])
            if here < len(steps):
                after[key] = (steps[here:], values[here:])
        here, rows = at - self.first, self.rows
        return (
            Stretch(self.first, at - 1, before, None if rows is None else rows.take(slice(here))),
            Stretch(at, self.last, after, None if rows is None else rows.take(slice(here, None))),
        )


@dataclass(slots=True)
class RunInfo:
    """Provenance of a run: what ran, from what code, on what machine, with which settings."""

    name: str
    command: list[str] = field(default_factory=list)
    cwd: str = ""
    is_script: bool = False
    is_module: bool = False
    watch: int = 0
    """Which ``clew.watch`` of its process recorded it, counted from 1; 0 for ``clew run``."""
    obstacle: str = ""
    """Why its command does not start it again, if so."""
    started: str = ""
    ended: str = ""
    state: str = "recording"
    exit_code: int | None = None
    rank: int = 0
    world_size: int = 1
    python: str = ""
    torch: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, Any] = field(default_factory=dict)
    """What the script has seeded by its first step: ``torch``, ``random``, ``numpy``; and ``SEED_AT_START``."""
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    trained_steps: int | None = None
    """How many steps the training had in all, known at its end; a full disk or a quota leaves fewer on record."""
