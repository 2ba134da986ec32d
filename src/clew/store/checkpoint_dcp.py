"""Folders of torch.distributed.checkpoint: a pickled ``.metadata`` and files full of shards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from clew.errors import CheckpointBroken, CheckpointUntrusted
from clew.store.checkpoint_bytes import FileBytes, read_all
from clew.store.checkpoint_dtype import ELEMENT_TYPES, ElementType
from clew.store.checkpoint_pickle import DAMAGE, Global, Record, interpret, keep
from clew.store.checkpoint_tensor import Part, StoredTensor, check_shape
from clew.store.checkpoint_torch import MAX_PICKLE_BYTES, read_archive

if TYPE_CHECKING:
    from pathlib import Path

METADATA: Final = ".metadata"
_HOME: Final = "torch.distributed.checkpoint"

_RECORDS: Final = (
    f"{_HOME}.metadata.Metadata",
    f"{_HOME}.metadata.TensorStorageMetadata",
    f"{_HOME}.metadata.BytesStorageMetadata",
    f"{_HOME}.metadata.ChunkStorageMetadata",
    f"{_HOME}.metadata.TensorProperties",
    f"{_HOME}.metadata.MetadataIndex",
    f"{_HOME}.metadata.StorageMeta",
    f"{_HOME}.metadata._MEM_FORMAT_ENCODING",
    f"{_HOME}.filesystem._StorageInfo",
    f"{_HOME}._extension.StreamTransformExtension",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "torch.serialization._get_layout",
    "torch.device",
)
_MAKERS: Final[dict[str, Any]] = (
    {name: keep(name) for name in (*_RECORDS, *(f"torch.{name}" for name in ELEMENT_TYPES))}
    | {"torch.Size": lambda sizes=(): tuple(sizes)}
    | dict.fromkeys(("collections.OrderedDict", "builtins.dict"), lambda *_: {})
)


def read_distributed(folder: Path) -> tuple[dict[Any, Any], list[str]]:
    """Return the saved tree, with its tensors joined from their shards, and notes on what was left out."""
    metadata = _read_metadata(folder)
    try:
        return _build(folder, metadata)
    except DAMAGE as error:
        raise CheckpointBroken(
            f"its metadata does not fit together ({type(error).__name__})", where=str(folder / METADATA)
        ) from None


def _read_metadata(folder: Path) -> Record:
    path = folder / METADATA
    size = path.stat().st_size
    if size > MAX_PICKLE_BYTES:
        raise CheckpointBroken(f"its metadata has {size:,} bytes", where=str(path))
    metadata = interpret(read_all(FileBytes(path, 0, size)).tobytes(), _MAKERS, where=str(path))
    if not isinstance(metadata, Record) or not isinstance(metadata.field("storage_data"), dict):
        raise CheckpointBroken("its metadata is not that of a distributed checkpoint", where=str(path))
    return metadata


def _build(folder: Path, metadata: Record) -> tuple[dict[Any, Any], list[str]]:
    places = _index(metadata.field("storage_data"))
    paths = metadata.field("planner_data")
    tree: dict[Any, Any] = {}
    notes: list[str] = []
    for name, item in metadata.field("state_dict_metadata").items():
        path = paths.get(name) if isinstance(paths, dict) else None
        if item.type.endswith(".TensorStorageMetadata"):
            value: Any = _join(folder, name, item, places)
        else:
            value = _read_object(folder, name, places, notes)
        _insert(tree, path if isinstance(path, tuple) and path else (name,), value)
    return tree, notes


def _index(storage: dict[Any, Any]) -> dict[tuple[str, Any], Record]:
    """Return where each shard lies, by name and by its place in the whole tensor."""
    return {(index.field("fqn"), _offset(index)): info for index, info in storage.items()}


def _offset(index: Record) -> tuple[int, ...] | None:
    offset = index.field("offset")
    return None if offset is None else tuple(offset)


def _join(folder: Path, name: str, item: Record, places: dict[tuple[str, Any], Record]) -> StoredTensor:
    element = ELEMENT_TYPES[_dtype_name(item.field("properties"))]
    shape = tuple(item.field("size"))
    where = f"{folder}: {name}"
    check_shape(shape, where)
    parts = []
    for chunk in item.field("chunks"):
        start, size = tuple(chunk.field("offsets")), tuple(chunk.field("sizes"))
        info = places.get((name, start)) or places[name, None]
        if len(start) != len(shape) or any(
            a < 0 or a + n > full for a, n, full in zip(start, size, shape, strict=True)
        ):
            raise CheckpointBroken(f"a shard at {start} of {size} lies outside shape {shape}", where=where)
        parts.append(Part(start, _read_shard(folder, info, element, size, where)))
    _check_cover(parts, shape, where)
    if len(parts) == 1:
        return parts[0].tensor
    return StoredTensor("", element, shape, None, parts=tuple(parts), where=where)


def _dtype_name(properties: Any) -> str:
    """Return the dtype, which torch pickles as the first of a tuple, or as a field in older versions."""
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(dtype, Global):
        raise TypeError
    return dtype.name.removeprefix("torch.")


def _read_shard(
    folder: Path, info: Record, element: ElementType, size: tuple[int, ...], where: str
) -> StoredTensor:
    tensor = _read_blob(folder, info, where)
    if not isinstance(tensor, StoredTensor) or tensor.shape != size or tensor.element is not element:
        raise CheckpointBroken("a shard is not the tensor that the metadata describes", where=where)
    return tensor


def _read_blob(folder: Path, info: Record, where: str) -> Any:
    """Return what ``torch.save`` wrote at the place of a shard, which must lie inside the folder."""
    if info.field("transform_descriptors"):
        raise CheckpointBroken(
            "its shards are compressed or encrypted, which clew does not read", where=where
        )
    path = folder / info.field("relative_path")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointBroken(f"its metadata leads outside the folder, to {path}", where=where)
    return read_archive(path, start=info.field("offset"), length=info.field("length"))


def _check_cover(parts: list[Part], shape: tuple[int, ...], where: str) -> None:
    """Refuse shards that together have not as many elements as the tensor: a rank's file is missing."""
    stored = sum(part.tensor.count for part in parts)
    if stored != math.prod(shape) or len({part.start for part in parts}) != len(parts):
        raise CheckpointBroken(
            f"its shards hold {stored:,} elements of {math.prod(shape):,}",
            where=where,
            next_step="copy all files of the folder, from every rank",
        )


def _read_object(folder: Path, name: str, places: dict[tuple[str, Any], Record], notes: list[str]) -> Any:
    """Return a saved object that is no tensor; one that would need code is left out with a note."""
    info = places.get((name, None))
    if info is None:
        return None
    try:
        return _read_blob(folder, info, f"{folder}: {name}")
    except CheckpointUntrusted as error:
        notes.append(f"'{name}' is left out: {error.what}")
        return "not read"


def _insert(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise TypeError
    tree[path[-1]] = value
