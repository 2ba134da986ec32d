"""The safetensors format: eight bytes of length, a JSON header, the data. Nothing in it can run.

Read and written here by hand because the package's numpy side knows no bfloat16 and no 8-bit floats, and
because the header of a file from elsewhere has to be doubted before it is believed.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import CheckpointBroken, UsageError
from clew.store.checkpoint_bytes import FileBytes
from clew.store.checkpoint_dtype import ELEMENT_TYPES, from_numpy
from clew.store.checkpoint_tensor import StoredTensor, check_shape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the format itself."""

CODES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_CODE_OF: Final = {name: code for code, name in CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What the header of one file says: its tensors in order of their place, and its text metadata."""

    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]


def read_tensors(path: Path) -> TensorFile:
    """Return the tensors of a file without reading their elements."""
    header, start, size = _read_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _broken("its metadata is not a table", path)
    tensors, spans = [], []
    for name, entry in header.items():
        begin, end, tensor = _read_entry(name, entry, path=path, data_start=start)
        tensors.append((begin, tensor))
        spans.append((begin, end, name))
    _check_spans(spans, size=size - start, path=path)
    tensors.sort(key=lambda pair: pair[0])
    text = {str(key): str(value) for key, value in metadata.items()}
    return TensorFile(tuple(tensor for _, tensor in tensors), text)


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the parsed header, where the data starts, and the size of the file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise _broken(f"it has only {size} bytes", path)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise _broken(f"its header claims {length:,} bytes in a file of {size:,}", path)
            text = file.read(length)
        header = json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointBroken(f"cannot read the file: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise _broken(f"its header cannot be read ({str(error)[:80]})", path) from None
    if not isinstance(header, dict):
        raise _broken("its header is not a table", path)
    return header, 8 + length, size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _read_entry(name: str, entry: Any, *, path: Path, data_start: int) -> tuple[int, int, StoredTensor]:
    where = f"{path}: {name}"
    try:
        code, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointBroken("a tensor's header lacks dtype, shape or data_offsets", where=where) from None
    if not (isinstance(code, str) and code in CODES):
        raise CheckpointBroken(f"unknown element type {str(code)[:40]}", where=where)
    check_shape(shape, where)
    element = ELEMENT_TYPES[CODES[code]]
    if element.packed > 1 and shape:
        shape = (*shape[:-1], shape[-1] // element.packed)
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise CheckpointBroken(f"impossible data_offsets [{begin}, {end}]", where=where)
    tensor = StoredTensor(name, element, shape, FileBytes(path, data_start + begin, end - begin), where=where)
    if tensor.size_bytes != end - begin:
        raise CheckpointBroken(
            f"shape {list(shape)} of {element.name} needs {tensor.size_bytes:,} bytes, "
            f"the file has {end - begin:,}",
            where=where,
        )
    return begin, end, tensor


def _check_spans(spans: list[tuple[int, int, str]], *, size: int, path: Path) -> None:
    """Refuse data beyond the end of the file, and tensors that lie over each other."""
    before, previous = 0, ""
    for begin, end, name in sorted(spans):
        if begin < before:
            raise _broken(f"the data of '{previous}' and '{name}' overlap", path)
        before, previous = end, name
    if before > size:
        raise _broken(f"it should hold {before:,} bytes of data and holds {size:,}: it is cut off", path)


def _broken(what: str, path: Path) -> CheckpointBroken:
    return CheckpointBroken(
        f"not a sound safetensors file: {what}", where=str(path), next_step="copy, download or save it again"
    )


def write_tensors(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    *,
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write arrays as one safetensors file; it appears under its name only when it is complete.

    ``dtypes`` names the true element type of arrays that carry one numpy does not know (uint16 for bfloat16).
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Widest elements first: every tensor then starts at a multiple of its own element size.
    names = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    offset = 0
    for name in names:
        array = arrays[name]
        end = offset + array.nbytes
        code = _code(name, array, (dtypes or {}).get(name))
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                file.write(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _code(name: str, array: NDArray[Any], declared: str | None) -> str:
    element = ELEMENT_TYPES.get(declared) if declared else from_numpy(array.dtype)
    if element is None or element.name not in _CODE_OF or element.item_bytes != array.dtype.itemsize:
        raise UsageError(f"'{name}': {declared or array.dtype} cannot be written as safetensors")
    if array.dtype.byteorder == ">":
        raise UsageError(f"'{name}': big-endian arrays cannot be written as safetensors")
    return _CODE_OF[element.name]
