"""What is wrong with the numbers in a checkpoint: NaN, infinity, dead or repeated weights, denormals.

A matrix of weights is never all zero, constant or full of equal rows by chance; a vector often is, because
biases start at zero and norms at one. So the same numbers are a warning in one and a note in the other.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.compare.checkpoint import select
from clew.compare.checkpoint_measure import block_elements, count_denormals, run_parallel, summarise_block
from clew.model.schema import STAT_INDEX
from clew.stats import reference
from clew.stats.spec import GOLDEN, MASK_64, MIX_1
from clew.store.checkpoint_bytes import FileBytes, read_all
from clew.store.checkpoint_dtype import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from clew.store.checkpoint import Checkpoint
    from clew.store.checkpoint_tensor import StoredTensor

FLAWS: Final = ("nan", "inf", "negative", "zero", "constant", "rows", "denormal", "range")
SEVERITIES: Final = ("note", "warning", "error")

HALF_MAX: Final = 65504.0
DENORMAL_SHARE: Final = 0.01
"""Below this share denormals are the tail of a healthy distribution."""
_NEVER_NEGATIVE: Final = ("running_var", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
_SAMPLED_COLUMNS: Final = 8
_CHANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing wrong with one tensor: ``count`` elements or rows of ``total``, the first of them at ``at``."""

    tensor: str
    kind: str
    severity: str
    text: str
    count: int
    total: int
    at: tuple[int, ...] = ()


@dataclass(slots=True)
class _Gathered:
    """What one pass over the blocks of a tensor finds."""

    row: NDArray[np.float64]
    first_nonfinite: int = -1
    denormals: int = 0
    row_hashes: NDArray[np.uint64] | None = None


def scan_checkpoint(
    checkpoint: Checkpoint, patterns: Sequence[str] = (), *, progress: Callable[[int], None] | None = None
) -> list[Flaw]:
    """Return what is wrong in the tensors whose names fit, in the order of the file; tied ones once."""
    tied = checkpoint.tied
    tensors = [tensor for tensor in select(checkpoint, patterns) if tensor.name not in tied]
    flaws: list[Flaw] = []
    for tensor, found in zip(tensors, run_parallel(scan_tensor, tensors), strict=True):
        flaws += found
        if progress:
            progress(tensor.size_bytes)
    return flaws


def scan_tensor(tensor: StoredTensor) -> list[Flaw]:
    """Return what is wrong with one tensor, worst first."""
    if tensor.count == 0 or tensor.element.kind not in ("float", "complex"):
        return []
    gathered = _gather(tensor)
    flaws = [
        *_find_nonfinite(tensor, gathered),
        *_find_negative(tensor, gathered),
        *_find_dead(tensor, gathered),
        *_find_repeated_rows(tensor, gathered),
        *_find_denormals(tensor, gathered),
        *_find_range(tensor, gathered),
    ]
    return sorted(flaws, key=lambda flaw: -SEVERITIES.index(flaw.severity))


def _gather(tensor: StoredTensor) -> _Gathered:
    rows = []
    wants_rows = _can_judge_rows(tensor)
    hashes = np.zeros(tensor.shape[0], np.uint64) if wants_rows else None
    result = _Gathered(np.empty(0), row_hashes=hashes)
    start = 0
    limit = block_elements(tensor)
    columns = tensor.count // tensor.shape[0] if wants_rows else 1
    for block in tensor.blocks(limit - limit % columns if columns <= limit else limit):
        row = summarise_block(block, tensor)
        rows.append(row)
        if result.first_nonfinite < 0 and row[1:4].any():
            result.first_nonfinite = start + _first_nonfinite(block, tensor)
        result.denormals += count_denormals(block, tensor)
        if hashes is not None:
            _hash_rows(block, start, columns, hashes)
        start += len(block)
    result.row = reference.merge(rows)
    return result


def _first_nonfinite(block: NDArray[Any], tensor: StoredTensor) -> int:
    values = widen(block, tensor.element)
    return int(np.flatnonzero(~np.isfinite(values))[0]) // tensor.element.packed


def _can_judge_rows(tensor: StoredTensor) -> bool:
    """Whether two equal rows would be a coincidence: enough random bits in a row for this many rows."""
    if (
        len(tensor.shape) < 2
        or tensor.shape[0] < 2
        or not tensor.element.is_float
        or tensor.section != "model"
    ):
        return False
    columns = tensor.count // tensor.shape[0]
    bits = min(tensor.element.mantissa * columns, 1000)
    return math.ldexp(tensor.shape[0] ** 2, -bits) < _CHANCE


def _hash_rows(block: NDArray[Any], start: int, columns: int, hashes: NDArray[np.uint64]) -> None:
    """Add some elements of each row, scrambled with their column, to the hash of the row."""
    chosen = np.unique(np.linspace(0, columns - 1, _SAMPLED_COLUMNS).astype(np.int64))
    salt = np.array([number * GOLDEN & MASK_64 for number in range(1, len(chosen) + 1)], np.uint64)
    raw = block.view(f"u{block.itemsize}")
    if len(raw) % columns == 0:
        picked = raw.reshape(-1, columns)[:, chosen].astype(np.uint64) + salt
        first = start // columns
        hashes[first : first + len(picked)] += _mix(picked).sum(axis=1, dtype=np.uint64)
        return
    # A row longer than a block: the block holds pieces of one or two rows.
    for row in range(start // columns, (start + len(raw) - 1) // columns + 1):
        places = row * columns + chosen - start
        inside = (places >= 0) & (places < len(raw))
        picked = raw[places[inside]].astype(np.uint64) + salt[inside]
        hashes[row : row + 1] += _mix(picked).sum(dtype=np.uint64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits, so that sums of several tell rows apart."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(MIX_1)
    values ^= values >> np.uint64(27)
    return values


def _find_nonfinite(tensor: StoredTensor, gathered: _Gathered) -> list[Flaw]:
    nan, pos_inf, neg_inf = (int(value) for value in gathered.row[1:4])
    total = int(gathered.row[0])
    at = _unravel(gathered.first_nonfinite, tensor.shape)
    flaws = []
    if nan:
        flaws.append(Flaw(tensor.name, "nan", "error", f"{nan:,} of {total:,} are NaN", nan, total, at))
    if pos_inf or neg_inf:
        count = pos_inf + neg_inf
        text = f"{count:,} of {total:,} are infinite ({pos_inf:,} +inf, {neg_inf:,} -inf)"
        flaws.append(Flaw(tensor.name, "inf", "error", text, count, total, at))
    return flaws


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    if position < 0 or not shape:
        return ()
    return tuple(int(index) for index in np.unravel_index(position, shape))


def _find_negative(tensor: StoredTensor, gathered: _Gathered) -> list[Flaw]:
    """Variances and second moments have no negative values in any sound training."""
    last = tensor.name.replace("/", ".").rpartition(".")[2]
    count = int(gathered.row[STAT_INDEX["negative"]])
    if last not in _NEVER_NEGATIVE or not count:
        return []
    total = int(gathered.row[0])
    text = f"{count:,} of {total:,} are negative, which a variance cannot be"
    return [Flaw(tensor.name, "negative", "error", text, count, total)]


def _find_dead(tensor: StoredTensor, gathered: _Gathered) -> list[Flaw]:
    row, total = gathered.row, int(gathered.row[0])
    if total < 2 or row[1:4].any() or row[STAT_INDEX["min"]] != row[STAT_INDEX["max"]]:
        return []
    is_matrix = sum(size > 1 for size in tensor.shape) >= 2 and tensor.section == "model"
    value = float(row[STAT_INDEX["min"]])
    kind, text = ("zero", "all zero") if value == 0 else ("constant", f"all equal to {value:.6g}")
    return [Flaw(tensor.name, kind, "warning" if is_matrix else "note", text, total, total)]


def _find_repeated_rows(tensor: StoredTensor, gathered: _Gathered) -> list[Flaw]:
    hashes = gathered.row_hashes
    if hashes is None or gathered.row[STAT_INDEX["min"]] == gathered.row[STAT_INDEX["max"]]:
        return []
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    suspects = np.flatnonzero(counts[inverse] > 1)
    if not len(suspects):
        return []
    seen: set[bytes] = set()
    repeated, zeros, first = 0, 0, -1
    for index, content in _read_rows(tensor, suspects.tolist()):
        digest = hashlib.blake2b(content.data, digest_size=16).digest()
        if not content.any():
            zeros += 1
        elif digest in seen:
            repeated += 1
            first = index if first < 0 else first
        seen.add(digest)
    return _name_rows(tensor, repeated=repeated, zeros=zeros, first=first)


def _read_rows(tensor: StoredTensor, indices: list[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield rows as bytes, one at a time where they lie in a file as they are."""
    source, size = tensor.source, tensor.size_bytes // tensor.shape[0]
    if isinstance(source, FileBytes) and tensor.strides is None:
        for index in indices:
            yield index, read_all(FileBytes(source.path, source.offset + index * size, size))
    else:
        rows = np.ascontiguousarray(tensor.load()).reshape(tensor.shape[0], -1)
        for index in indices:
            yield index, rows[index].view(np.uint8)


def _name_rows(tensor: StoredTensor, *, repeated: int, zeros: int, first: int) -> list[Flaw]:
    total, flaws = tensor.shape[0], []
    if repeated:
        text = f"{repeated:,} of {total:,} rows repeat an earlier row"
        flaws.append(Flaw(tensor.name, "rows", "warning", text, repeated, total, (first,)))
    if zeros:
        flaws.append(Flaw(tensor.name, "rows", "note", f"{zeros:,} of {total:,} rows are zero", zeros, total))
    return flaws


def _find_denormals(tensor: StoredTensor, gathered: _Gathered) -> list[Flaw]:
    total = int(gathered.row[0])
    if not gathered.denormals:
        return []
    is_many = gathered.denormals > DENORMAL_SHARE * total and tensor.section == "model"
    text = f"{gathered.denormals:,} of {total:,} are denormal (slow, and flushed to zero by some hardware)"
    severity = "warning" if is_many else "note"
    return [Flaw(tensor.name, "denormal", severity, text, gathered.denormals, total)]


def _find_range(tensor: StoredTensor, gathered: _Gathered) -> list[Flaw]:
    largest = float(gathered.row[STAT_INDEX["abs_max"]])
    if math.isnan(largest) or largest <= HALF_MAX or tensor.section != "model":
        return []
    text = f"largest magnitude {largest:.4g}: beyond float16"
    return [Flaw(tensor.name, "range", "note", text, 1, int(gathered.row[0]))]
