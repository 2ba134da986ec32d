"""Open a checkpoint of any format as named tensors that stay on disk, running nothing that it contains."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from clew.errors import CheckpointBroken, CheckpointUntrusted
from clew.store.checkpoint_dcp import METADATA, read_distributed
from clew.store.checkpoint_numpy import read_array, read_arrays
from clew.store.checkpoint_pickle import TRUST_STEP
from clew.store.checkpoint_torch import read_archive
from clew.store.checkpoint_tree import Contents, Value, add_optimizer, arrange, is_optimizer
from clew.store.checkpoint_zip import read_directory
from clew.store.tensors import read_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from clew.store.checkpoint_tensor import StoredTensor

_KNOWN: Final = "clew reads torch.save archives, safetensors, npz, npy and distributed checkpoint folders"
_MAX_INDEX_BYTES: Final = 100_000_000
_WEIGHTS: Final = ("*.safetensors.index.json", "*.bin.index.json", "*.safetensors", "pytorch_model*.bin")
"""What holds the weights in a folder; the first that is there counts."""
_OPTIMIZERS: Final = ("optimizer.pt", "optimizer.bin")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds: tensors in the file's order, other values by name, notes for the reader."""

    path: Path
    format: str
    tensors: tuple[StoredTensor, ...]
    values: dict[str, Value]
    notes: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        tied = self.tied
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.name not in tied)

    @property
    def tied(self) -> dict[str, str]:
        """Names of tensors that lie over the same bytes as an earlier one, and the earlier one's name."""
        first: dict[Any, str] = {}
        ties = {}
        for tensor in self.tensors:
            if tensor.source is not None:
                key = (tensor.source, tensor.shape, tensor.strides, tensor.dtype)
                name = first.setdefault(key, tensor.name)
                if name != tensor.name:
                    ties[tensor.name] = name
        return ties


def from_contents(path: Path, kind: str, contents: Contents) -> Checkpoint:
    """Return a checkpoint of contents that were read by other means."""
    return Checkpoint(path, kind, tuple(contents.tensors), contents.values, tuple(contents.notes))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the contents of a file or folder; raises CheckpointUntrusted when that would run its code."""
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        what = "not a regular file" if path.exists() else "no such file or folder"
        raise CheckpointBroken(what, where=str(path))
    if path.name.endswith(".index.json"):
        return _read_index(path)
    kind = _recognise(path)
    if kind == "torch":
        return from_contents(path, kind, arrange(read_archive(path), str(path)))
    if kind == "safetensors":
        file = read_tensors(path)
        metadata = {f"metadata.{key}": value for key, value in file.metadata.items()}
        return Checkpoint(path, kind, file.tensors, dict(metadata))
    tensors = [read_array(path)] if kind == "npy" else read_arrays(path)
    return Checkpoint(path, kind, tuple(tensors), {})


def _recognise(path: Path) -> str:
    """Return the format of a file by what it contains, whatever its name ends in."""
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise CheckpointBroken(f"cannot read the file: {error.strerror}", where=str(path)) from None
    if head.startswith(b"PK"):
        names = read_directory(path)
        if not names:
            raise CheckpointBroken("an empty archive", where=str(path))
        if any(name.endswith("/data.pkl") for name in names):
            return "torch"
        if all(name.endswith(".npy") for name in names):
            return "npz"
        raise CheckpointBroken("a zip archive, but neither torch's nor numpy's", where=str(path))
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    if head.startswith(b"\x80") or head[257:262] == b"ustar":
        kind = "a tar" if head[257:262] == b"ustar" else "a bare pickle"
        raise CheckpointUntrusted(
            f"it is {kind}, as torch wrote before 1.6 or pickle.dump writes: reading it can run any code",
            where=str(path),
            next_step=TRUST_STEP,
        )
    what = "the file is empty" if not head else f"not a checkpoint; it starts with {head[:8]!r}"
    raise CheckpointBroken(what, where=str(path), next_step=_KNOWN)


def _read_folder(folder: Path) -> Checkpoint:
    if (folder / METADATA).is_file():
        tree, notes = read_distributed(folder)
        contents = arrange(tree, str(folder))
        contents.notes += notes
        return from_contents(folder, "distributed", contents)
    for pattern in _WEIGHTS:
        found = sorted(folder.glob(pattern))
        if found:
            index = found[0].name.endswith(".index.json")
            checkpoint = _read_index(found[0]) if index else _read_shards(folder, found)
            return _with_optimizer(folder, checkpoint)
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".pt", ".pth", ".ckpt", ".npz", ".bin")
    )
    if len(files) == 1:
        return read_checkpoint(files[0])
    listed = ", ".join(path.name for path in files[:5])
    raise CheckpointBroken(
        "the folder is not one checkpoint",
        where=str(folder),
        next_step=f"name one of its files: {listed}" if files else _KNOWN,
    )


def _read_index(path: Path) -> Checkpoint:
    """Return the checkpoint of an index that says which file holds which tensor."""
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError("it is too large")
        places = json.loads(path.read_bytes())["weight_map"]
        files = {str(name) for name in places.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointBroken(f"the index cannot be read: {str(error)[:80]}", where=str(path)) from None
    outside = [name for name in files if "/" in name or "\\" in name or name in ("", ".", "..")]
    if outside:
        raise CheckpointBroken(f"the index leads outside its folder, to '{outside[0][:80]}'", where=str(path))
    checkpoint = _read_shards(path.parent, sorted(path.parent / name for name in files))
    absent = sorted(set(places) - {tensor.name for tensor in checkpoint.tensors})
    if absent:
        raise CheckpointBroken(
            f"the index names {len(absent)} tensors that no shard holds, '{absent[0]}' first", where=str(path)
        )
    return checkpoint


def _read_shards(folder: Path, files: Sequence[Path]) -> Checkpoint:
    """Return several files as one checkpoint; a name that two of them hold gets its file's name before it."""
    parts = [read_checkpoint(path) for path in files]
    holders = Counter(tensor.name for part in parts for tensor in part.tensors)
    tensors: list[StoredTensor] = []
    values: dict[str, Value] = {}
    for part in parts:
        for tensor in part.tensors:
            name = f"{part.path.stem}.{tensor.name}" if holders[tensor.name] > 1 else tensor.name
            tensors.append(tensor.named(name, section=tensor.section))
        values |= part.values
    notes = tuple(note for part in parts for note in part.notes)
    return Checkpoint(folder, parts[0].format, tuple(tensors), values, notes)


def _with_optimizer(folder: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Add the state of an optimizer that lies beside the weights, as the Hugging Face trainer writes it."""
    path = next((folder / name for name in _OPTIMIZERS if (folder / name).is_file()), None)
    if path is None:
        return checkpoint
    contents = Contents(list(checkpoint.tensors), dict(checkpoint.values), list(checkpoint.notes))
    try:
        tree = read_archive(path)
    except CheckpointUntrusted as error:
        contents.notes.append(f"{path.name} is left out: {error.what}")
    else:
        if is_optimizer(tree):
            ordered = checkpoint.format == "torch"
            add_optimizer(contents, tree, prefix="optimizer/", where=str(path), is_ordered=ordered)
    return from_contents(folder, checkpoint.format, contents)
