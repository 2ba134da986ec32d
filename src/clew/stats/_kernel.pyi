"""The compiled loops. Addresses are integers; 0 for a hash or a histogram that is not wanted."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

def configure(
    types: tuple[type, ...],
    codes: dict[torch.dtype, int],
    questions: tuple[Callable[..., Any], ...],
    openmp: int,
    exchange: object,
    /,
) -> None: ...
def measure(tensor: torch.Tensor, row: int, hash: int, hist: int, threads: int, /) -> bool: ...
def measure_many(
    tensors: Sequence[torch.Tensor], row: int, hash: int, hist: int, threads: int, /
) -> list[int]: ...
def measure_updates(
    new: Sequence[torch.Tensor],
    old: Sequence[torch.Tensor],
    row: int,
    hash: int,
    hist: int,
    threads: int,
    /,
) -> list[int]: ...
def settle(
    values: bytearray,
    hashes: bytearray | None,
    hists: bytearray | None,
    copies: list[tuple[int, int]],
    chosen: int,
    count: int,
    /,
) -> tuple[bool, list[float]]: ...
def list_of_type(things: list[Any], type: type, /) -> list[Any]: ...
def find_bad(references: list[weakref.ref[torch.Tensor]], of_gradients: bool, /) -> int: ...
def read_number(tensor: torch.Tensor, /) -> float | None: ...
def glance(tensor: torch.Tensor, most: int, /) -> tuple[float, ...] | None: ...
def glance_row(tensor: torch.Tensor, row: int, most: int, /) -> tuple[float, ...] | None: ...
def count_zeros(tensor: torch.Tensor, first: int, /) -> int | None: ...
def count_labels(tensors: list[torch.Tensor], /) -> dict[int, int] | None: ...
def list_leaves(value: object, /) -> list[torch.Tensor] | None: ...
def add_up(tensor: torch.Tensor, most: int, /) -> float | None: ...
def sample_rows(tensor: torch.Tensor, rows: int, numbers: int, /) -> bytes | None: ...
def sample_first(
    value: object, numbers: int, fewest: int, /
) -> tuple[int, bytes, int] | tuple[()] | None: ...
def find_place(
    frame: FrameType, known: dict[int, bool], judge: Callable[[CodeType], bool], frames: int, most: int, /
) -> tuple[int, ...]: ...
def stamp(tensors: list[torch.Tensor], /) -> list[tuple[int, int] | None]: ...
def weigh(value: object, /) -> tuple[list[int], int] | None: ...
def copy_buffers(pairs: list[tuple[torch.Tensor, torch.Tensor]], /) -> bool: ...
def list_stale(
    tensors: list[torch.Tensor], copies: list[torch.Tensor | None], versions: list[int], /
) -> list[int]: ...
def list_frames(frame: FrameType, known: list[tuple[int, int, CodeType]], /) -> None: ...
def has_same(dicts: list[dict[str, Any]], others: list[dict[str, Any]], keys: tuple[str, ...], /) -> bool: ...
def holds(groups: list[dict[str, Any]], parameters: list[torch.Tensor], /) -> bool: ...
def list_versions(tensors: list[torch.Tensor], /) -> list[int]: ...
def list_gradients(tensors: list[torch.Tensor], /) -> list[torch.Tensor] | None: ...
def take(
    count: int, row: int, hash: int, hist: int, /
) -> tuple[bytearray, bytearray | None, bytearray | None]: ...
def copy_memory(blocks: bytes, /) -> None: ...
def has_same_copies(blocks: bytes, others: bytes, /) -> bool: ...
def measure_memory(address: int, type: int, count: int, row: int, hash: int, hist: int, /) -> None: ...
def merge(row: int, hash: int, hist: int, other_row: int, other_hash: int, other_hist: int, /) -> None: ...
def turn_rows(
    pieces: int, n: int, kinds: bytes, counts: int, numbers: int, largest: int, rows: int, /
) -> None: ...
def turn_over(
    width: int, to_width: int, pieces: int, n: int, row: int, columns: int, to: int, to_row: int, /
) -> None: ...
def crc32(address: int, bytes: int, crc: int, /) -> int | None: ...
def pack_histograms(counts: int, rows: int, ends: int, packed: int, /) -> None: ...
def select(name: str, /) -> str: ...
def variants() -> tuple[str, ...]: ...

class Clock:
    """The compiled twin of ``clew.capture.clock.StepClock``; absent where there is no monotonic clock."""

    def __new__(cls, phases: int, own: int, /) -> Clock: ...
    @property
    def phase(self) -> int: ...
    def switch(self, phase: int, /) -> int: ...
    def charge(self, seconds: float, /) -> None: ...
    def mark(self) -> None: ...
    def split(self) -> list[float]: ...
    def restart(self) -> None: ...

class Tray:
    """Puts tensors down as rows of its owner's step, without a Python frame."""

    def __new__(cls, owner: Any, shapes: list[Any], lock: Any, clock: Clock, /) -> Tray: ...
    def aim(self, capacity: int, row: int, hash: int, hist: int, /) -> None: ...
    def measure(self, tensor: torch.Tensor, site: int, tag: int, /) -> int: ...
    def measure_many(self, tensors: list[torch.Tensor], keys: list[int], /) -> list[int] | None: ...

class Hook:
    """Puts the gradient it is called with down under each of its keys, while its tray's owner wants it."""

    def __new__(cls, tray: Tray, keys: list[int], call_seconds: float, /) -> Hook: ...
    def __call__(self, gradient: torch.Tensor | None, /) -> None: ...

class Leaf:
    """Sees the outputs of modules and has their gradients seen, without a Python frame; a kind is -1 if unwanted."""

    def __new__(
        cls,
        tray: Tray,
        anchors: dict[int, Any],
        watch: Callable[[torch.Tensor, int], list[int] | None],
        output_kind: int,
        gradient_kind: int,
        /,
    ) -> Leaf: ...
    def see(self, site: int, tensor: torch.Tensor, tag: int, /) -> None: ...
    def observe(self, modules: dict[int, Any], module: object, output: object, tag: int, /) -> bool: ...
    def forget(self) -> None: ...

class Ledger:
    """What the steps of a recording took and cost, and whether the next one is due."""

    share: float
    bank: float
    most: float
    cost: float
    unseen: float
    period: int
    warmup_steps: int
    forced_until: int
    found_until: int
    recorded: int
    probed_at: int
    thinned: int
    since_last: int
    def account(self, step: int, cost_seconds: float, wall_seconds: float, was_due: bool, /) -> None: ...
    def is_probed(self, step: int, /) -> bool: ...
    def is_due(self, step: int, /) -> bool: ...

class Course:
    """What the end of a usual step touches of a flight recorder; the attributes are those of that."""

    frames: list[tuple[int, int, CodeType]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    known: dict[int, Any]
    blocks: bytes | None
    spare: Any
    trees: int
    passes: int
    usual_passes: int
    look_at: int
    looked_at: int
    ended: int
    ends: int
    ended_at: float
    step_seconds: float
    has_loader: bool
    has_start: bool
    references: list[weakref.ref[torch.Tensor]]
    outermost: list[weakref.ref[torch.Tensor]]
    def keep_pace(self, step: int, /) -> None: ...
    def rest(self) -> None: ...
    def end_pass(self, beat: Beat, phase: int, /) -> bool: ...
    def end_update(
        self, beat: Beat, entry: object | None, groups: object, keys: tuple[str, ...], phase: int, /
    ) -> int: ...

class Holder:
    """The thread whose training is recorded, and whether another trains at the same time."""

    thread: int
    is_shared: bool

class Turns:
    """What the signature of a loop counts at the end of a step."""

    reason: str
    steps: int
    turn: int
    lowest: float
    highest: float

class Updates:
    """What a step touches of an optimizer."""

    known_groups: list[dict[str, Any]]
    rates: list[Any]
    turn: object
    parameters: list[torch.Tensor]
    tensors: list[torch.Tensor]
    param_keys: list[int]
    grad_keys: list[int]
    shadows: Any
    may_scale: bool
    stepped: int
    steps: int

class Latch:
    """A lock that its holder may take again, as ``threading.RLock`` is."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *_: object) -> None: ...

class Place:
    """A module under observation: its site, and its calls in the current step."""

    site: int
    serial: int
    calls: int
    eval_calls: int
    recalls: int
    eval_recalls: int
    wanted: bool
    off: bool

class Source:
    """An iterator of a loader, as the gate at batches knows it."""

    ref: weakref.ref[Any]
    name: str
    pending: list[Any]
    position: int

class Shelf:
    """What batches and the end of a usual step touch of the snapshots; the attributes are those of these."""

    given: list[Any]
    entries: deque[Any]
    ahead: deque[Any]
    off: str
    blocks: bytes | None
    spare: Any
    given_type: type
    entry_type: type
    memory_type: type
    is_whole: bool
    clones: bool
    is_ending: bool
    is_dear: bool
    keep_batches: int
    pending_bytes: int
    flush_bytes: int
    ring_bytes: int
    trouble_at: int
    def stay_quiet(self, seconds: float, /) -> None: ...

class Beat:
    """What a quiet step touches of a recording; the attributes are those of the recorder."""

    longest_backlog: int
    most_recorded: int
    alone_at: int
    nested: int
    quiet_with: int
    updating: int
    resumes: int
    seeing: int
    tag: int
    wants_loss: bool
    wants_batch: bool
    wants_param: bool
    wants_grad: bool
    wants_update: bool
    wants_after: bool
    fetching: bool
    @property
    def inside(self) -> int: ...
    @property
    def rooted(self) -> int: ...
    def stay_quiet(self, seconds: float, /) -> None: ...
    def end_quietly(self) -> bool: ...
    def begin_call(self, module: object, args: object, kwargs: object, phase: int, /) -> int: ...
    def begin_pass(self, loss: object | None, phase: int, /) -> int: ...

class GatedCall:
    """A call of a model, as its gate gives it to torch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class CallGate:
    """The method that calls modules."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        beat: Beat,
        flags: dict[str, Any],
        ask: Callable[[], object],
        fail: Callable[[Exception], object],
        leaf: Leaf | None,
        entries: dict[int, Any],
        finish: Callable[..., object],
        phase: int,
    ) -> CallGate: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class PassGate:
    """The function of backward passes."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        beat: Beat,
        course: Course,
        entries: dict[int, Any],
        flags: dict[str, Any],
        fail: Callable[[Exception], object],
        finish: Callable[[Any, int], object],
        phase: int,
    ) -> PassGate: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class StepGate:
    """The hooks around the steps of optimizers."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        beat: Beat,
        course: Course,
        entries: dict[int, Any],
        ask: Callable[[], int],
        fail: Callable[[Exception], object],
        finish: Callable[[int, int, Any], object],
        lists: tuple[str, ...],
        measure: Callable[[Any], object],
        phase: int,
    ) -> StepGate: ...
    def before(self, optimizer: object, args: Any, kwargs: Any, /) -> Any: ...
    def after(self, optimizer: object, args: Any, kwargs: Any, /) -> None: ...

class IdleGate:
    """A method that is torch's own while all these lists of listeners are empty."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        lists: tuple[list[Any], ...],
    ) -> IdleGate: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class LookGate:
    """A function that is torch's own while all these lists are empty."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        lists: tuple[list[Any], ...],
    ) -> LookGate: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class FetchGate:
    """The method that gives a loader's next batch."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        beat: Beat,
        course: Course,
        entries: dict[int, Any],
        ask: Callable[[], int],
        fail: Callable[[Exception], object],
        finish: Callable[..., object],
        lists: tuple[Any, ...],
        phase: int,
    ) -> FetchGate: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class IndexGate:
    """The method that gives the indices which the next batch is made of."""

    def __new__(
        cls,
        *,
        original: Callable[..., Any],
        general: Callable[..., Any],
        beat: Beat,
        entries: dict[int, Any],
    ) -> IndexGate: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Callable[..., Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class LossGate:
    """A function that is torch's own while there are gradients."""

    def __new__(
        cls, *, original: Callable[..., Any], general: Callable[..., Any], beat: Beat
    ) -> LossGate: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
