"""What ``torch.save`` writes, read without torch: a zip of one pickle and one entry per storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from clew.errors import CheckpointBroken, CheckpointUntrusted
from clew.store.checkpoint_bytes import FileBytes, MemoryBytes, read_all
from clew.store.checkpoint_dtype import ELEMENT_TYPES, ElementType, from_numpy
from clew.store.checkpoint_pickle import TRUST_STEP, Global, Record, interpret, keep, set_pairs
from clew.store.checkpoint_tensor import StoredTensor, place
from clew.store.checkpoint_zip import ZipEntry, read_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_PICKLE_BYTES: Final = 256 << 20

_STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "int8",
    "QUInt8Storage": "uint8",
    "QInt32Storage": "int32",
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of the archive; ``element`` is None when the tensors over it name their own type."""

    element: ElementType | None
    source: FileBytes | MemoryBytes


def read_archive(path: Path, *, start: int = 0, length: int | None = None) -> Any:
    """Return the tree that was saved: containers, numbers, text, ``Record``; tensors stay in the file."""
    entries = read_directory(path, start=start, length=length)
    main = next((name for name in entries if name.endswith("/data.pkl")), None)
    if main is None:
        raise CheckpointBroken("a zip archive without data.pkl: not written by torch.save", where=str(path))
    root = main.removesuffix("data.pkl")
    if f"{root}constants.pkl" in entries:
        raise CheckpointUntrusted(
            "it is a TorchScript program, not a state dict", where=str(path), next_step=TRUST_STEP
        )
    for entry in entries.values():
        if entry.is_deflated:
            raise CheckpointBroken(
                f"the entry '{entry.name}' is compressed, which torch.save never does",
                where=str(path),
                next_step="zip it again without compression, or save it again with torch",
            )
    order = _read_entry(path, entries, f"{root}byteorder", limit=16)
    if order not in (b"", b"little"):
        raise CheckpointBroken("it was saved on a big-endian machine", where=str(path))
    data = _read_entry(path, entries, main, limit=MAX_PICKLE_BYTES)
    return interpret(data, _MAKERS, where=str(path), load_storage=_storage_loader(path, entries, root))


def _read_entry(path: Path, entries: dict[str, ZipEntry], name: str, *, limit: int) -> bytes:
    """Return a small entry; an absent one is empty."""
    entry = entries.get(name)
    if entry is None:
        return b""
    if entry.size > limit:
        raise CheckpointBroken(f"the entry '{name}' has {entry.size:,} bytes", where=str(path))
    return read_all(entry.source(path)).tobytes()


def _storage_loader(path: Path, entries: dict[str, ZipEntry], root: str) -> Callable[[Any], _Storage]:
    def load(reference: Any) -> _Storage:
        tag, kind, key, _location, count = reference
        if tag != "storage" or not isinstance(kind, Global) or not isinstance(key, str):
            raise TypeError
        entry = entries.get(f"{root}data/{key}")
        if entry is None and count:
            raise CheckpointBroken(f"the archive lacks the storage 'data/{key}'", where=str(path))
        element = ELEMENT_TYPES.get(_STORAGES.get(kind.name.removeprefix("torch."), ""))
        size = entry.size if entry else 0
        expected = count * (element.item_bytes if element else 1)
        if size < expected:
            raise CheckpointBroken(
                f"the storage 'data/{key}' should hold {expected:,} bytes and holds {size:,}", where=str(path)
            )
        return _Storage(element, FileBytes(path, entry.offset if entry else 0, size))

    return load


def _view(storage: _Storage, offset: int, shape: Any, strides: Any, element: ElementType) -> StoredTensor:
    where = str(storage.source.path) if isinstance(storage.source, FileBytes) else ""
    return place(
        element, storage.source, offset=offset, shape=tuple(shape), strides=tuple(strides), where=where
    )


def _make_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    if not isinstance(storage, _Storage) or storage.element is None:
        raise TypeError
    return _view(storage, offset, shape, strides, storage.element)


def _make_typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> StoredTensor:
    if not isinstance(storage, _Storage):
        raise TypeError
    return _view(storage, offset, shape, strides, ELEMENT_TYPES[dtype.name.removeprefix("torch.")])


def _make_sparse(_layout: Any, data: Any) -> dict[str, Any]:
    """Return the dense tensors that a sparse one consists of, by their names in torch."""
    if isinstance(data[2], StoredTensor):
        return {"crow_indices": data[0], "col_indices": data[1], "values": data[2]}
    return {"indices": data[0], "values": data[1]}


def _make_from_type(function: Any, _type: Any, args: Any, _state: Any) -> Any:
    if not isinstance(function, Global):
        raise TypeError
    return function.make(*args)


def _make_array(*_: Any) -> Record:
    return Record("numpy.ndarray")


def _make_scalar(dtype: Any, data: Any = b"") -> Any:
    values = np.frombuffer(data, dtype=_numpy_dtype(dtype))
    return values[0].item()


def _numpy_dtype(record: Any) -> np.dtype[Any]:
    """Return a plain numeric dtype from its pickled form; a dtype of objects or fields is refused."""
    code = record.args[0]
    dtype = np.dtype(code) if isinstance(code, str) and len(code) <= 4 else np.dtype(object)
    if from_numpy(dtype) is None:
        raise CheckpointUntrusted(f"it holds a numpy array of '{code}'", next_step=TRUST_STEP)
    return dtype.newbyteorder(record.state[1]) if record.state and dtype.itemsize > 1 else dtype


def array_to_tensor(record: Record, where: str) -> StoredTensor:
    """Return the tensor of a numpy array that lies inside a pickle."""
    _version, shape, dtype, is_fortran, data = record.state
    array = np.frombuffer(data, dtype=_numpy_dtype(dtype))
    element = from_numpy(array.dtype)
    assert element is not None
    source = MemoryBytes(array.astype(element.carrier).view(np.uint8))
    steps, step = [], 1
    for size in shape if is_fortran else reversed(shape):
        steps.append(step)
        step *= size
    strides = tuple(steps if is_fortran else reversed(steps))
    return place(element, source, offset=0, shape=shape, strides=strides, where=where)


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8"):
        raise ValueError
    return text.encode(encoding)


def _make_dict(*args: Any) -> dict[Any, Any]:
    """Return an empty dictionary, or one of the pairs given; a default factory is dropped."""
    table: dict[Any, Any] = {}
    items = args[-1] if args and not isinstance(args[-1], Global) else ()
    set_pairs(table, items.items() if isinstance(items, dict) else items)
    return table


def _make_list(*args: Any) -> list[Any]:
    return list(args[0]) if args else []


def _build_makers() -> dict[str, Callable[..., Any]]:
    makers: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor_v2": _make_tensor,
        "torch._utils._rebuild_tensor_v3": _make_typed_tensor,
        "torch._utils._rebuild_qtensor": _make_tensor,
        "torch._utils._rebuild_sparse_tensor": _make_sparse,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
        "torch._tensor._rebuild_from_type_v2": _make_from_type,
        "torch.Size": lambda sizes=(): tuple(sizes),
        "_codecs.encode": _encode,
        "builtins.complex": complex,
    }
    makers |= dict.fromkeys(_DICTS, _make_dict)
    makers |= dict.fromkeys(_LISTS, _make_list)
    for core in ("numpy.core", "numpy._core"):
        makers[f"{core}.multiarray._reconstruct"] = _make_array
        makers[f"{core}.multiarray.scalar"] = _make_scalar
    storages = (*(f"torch.{name}" for name in _STORAGES), "torch.storage.UntypedStorage")
    dtypes = (f"torch.{name}" for name in ELEMENT_TYPES)
    return makers | {name: keep(name) for name in (*_INERT, *storages, *dtypes)}


_DICTS: Final = (
    "builtins.dict",
    "collections.OrderedDict",
    "collections.defaultdict",
    "collections.Counter",
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
_LISTS: Final = (
    "builtins.list",
    "builtins.tuple",
    "builtins.set",
    "builtins.frozenset",
    "builtins.bytearray",
    "collections.deque",
)
_INERT: Final = (
    "argparse.Namespace",
    "builtins.bool",
    "builtins.float",
    "builtins.int",
    "builtins.object",
    "builtins.str",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Buffer",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
)
"""Kept as a name and arguments; common in checkpoints, and harmless because nothing is made of them."""

_MAKERS: Final = _build_makers()
