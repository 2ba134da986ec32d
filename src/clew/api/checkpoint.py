"""Open checkpoints, look at them, compare and scan them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clew.errors import CheckpointUntrusted, MissingExtra
from clew.store.checkpoint import Checkpoint, from_contents, read_checkpoint

if TYPE_CHECKING:
    import torch

    from clew.compare.checkpoint import CheckpointDiff
    from clew.compare.checkpoint_scan import Flaw
    from clew.store.checkpoint_tensor import StoredTensor


def open_checkpoint(path: str | Path, *, trust: bool = False) -> Checkpoint:
    """Open a .pt, .pth, .bin, .ckpt, .safetensors, .npz or .npy file, or a folder of a sharded checkpoint.

    Tensors stay on disk until they are asked for, and nothing in the file is executed. A file that can only be
    read by running the code in it is refused, unless ``trust`` says that you know where it comes from.
    """
    path = Path(path)
    try:
        return read_checkpoint(path)
    except CheckpointUntrusted:
        if not trust or not path.is_file():
            raise
        return _load_trusted(path)


def diff_checkpoints(
    a: str | Path, b: str | Path, *, match: tuple[str, ...] = (), trust: bool = False
) -> CheckpointDiff:
    """Return what differs between two checkpoints, the first being the reference."""
    from clew.compare import checkpoint

    left, right = open_checkpoint(a, trust=trust), open_checkpoint(b, trust=trust)
    return checkpoint.diff_checkpoints(left, right, match)


def scan_checkpoint(path: str | Path, *, match: tuple[str, ...] = (), trust: bool = False) -> list[Flaw]:
    """Return what is wrong with the numbers in a checkpoint: NaN, infinity, dead or repeated weights."""
    from clew.compare import checkpoint_scan

    return checkpoint_scan.scan_checkpoint(open_checkpoint(path, trust=trust), match)


def _load_trusted(path: Path) -> Checkpoint:
    """Unpickle a file that its owner vouches for: this runs whatever code it names."""
    from clew.store.checkpoint_tree import arrange

    if path.suffix in (".npy", ".npz"):
        import numpy as np

        loaded = np.load(path, allow_pickle=True)
        tree: Any = loaded.item() if path.suffix == ".npy" and loaded.shape == () else dict(loaded)
        return from_contents(path, "numpy", arrange(_convert(tree), str(path)))
    try:
        import torch
    except ImportError:
        raise MissingExtra(
            "unpickling a checkpoint needs torch", where=str(path), next_step="pip install 'clew[torch]'"
        ) from None
    try:
        with warnings.catch_warnings():
            # torch.load warns that it hands TorchScript on to torch.jit.load: that is what is wanted.
            warnings.simplefilter("ignore")
            tree = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise CheckpointUntrusted(
            f"torch cannot unpickle it: {type(error).__name__}: {str(error)[:200]}",
            where=str(path),
            next_step="run clew where the code that saved it can be imported",
        ) from error
    return from_contents(path, "torch", arrange(_convert(tree), str(path)))


def _convert(node: Any) -> Any:
    """Return a loaded tree in the plain form that a safely read one has."""
    import sys

    import numpy as np

    from clew.store.checkpoint_pickle import Record

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(node, torch.nn.Module):
        node = node.state_dict()
    if torch is not None and isinstance(node, torch.Tensor):
        return _convert_tensor(node)
    if isinstance(node, np.ndarray) and node.dtype != object:
        return _wrap(np.ascontiguousarray(node))
    if isinstance(node, dict):
        return {key: _convert(value) for key, value in node.items()}
    if isinstance(node, (list, tuple, set, frozenset)):
        return [_convert(value) for value in node]
    if node is None or isinstance(node, (str, int, float, bool, bytes)):
        return node
    return Record(f"{type(node).__module__}.{type(node).__qualname__}")


def _convert_tensor(tensor: torch.Tensor) -> Any:
    import torch

    from clew.store.checkpoint_dtype import ELEMENT_TYPES

    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return {"indices": _convert_tensor(tensor.indices()), "values": _convert_tensor(tensor.values())}
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    element = ELEMENT_TYPES.get(str(tensor.dtype).removeprefix("torch."))
    if element is None:
        return _convert_tensor(tensor.to(torch.complex64 if tensor.is_complex() else torch.float32))
    flat = tensor.contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy() if flat.numel() else flat.to(torch.uint8).numpy()
    return _wrap(raw.view(element.carrier).reshape(tuple(tensor.shape)), element.name)


def _wrap(array: Any, dtype: str = "") -> StoredTensor | str:
    import numpy as np

    from clew.store.checkpoint_bytes import MemoryBytes
    from clew.store.checkpoint_dtype import ELEMENT_TYPES, from_numpy
    from clew.store.checkpoint_tensor import StoredTensor

    element = ELEMENT_TYPES[dtype] if dtype else from_numpy(array.dtype)
    if element is None:
        return f"array of {array.dtype}"
    raw = array.astype(element.carrier, copy=False).reshape(-1).view(np.uint8)
    return StoredTensor("", element, array.shape, MemoryBytes(raw))
