"""What every loop shares: a seeded start, and an end that digests all state the training left behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct

import numpy as np
import torch

_LOSSES: list[float] = []


def start(seed: int = 0) -> None:
    """Make the script deterministic: one thread, all three generators seeded."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    _LOSSES.clear()


def note(loss: torch.Tensor | float) -> None:
    """Print a loss with every bit of it and keep it for the digest."""
    value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    _LOSSES.append(value)
    print("loss", value.hex())


def watching(*objects: object):
    """Return ``clew.watch`` of the objects when the test asks for that, and nothing otherwise."""
    out = os.environ.get("LOOP_WATCH_OUT")
    if not out:
        return contextlib.nullcontext()
    import clew

    return clew.watch(*objects, out=out, name="watched", budget="off")


def finish(*objects: object) -> None:
    """Print one digest for each kind of state; models, optimizers and plain data come in any order."""
    parts = {"weights": [], "buffers": [], "optimizers": [], "others": []}
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            parts["weights"].append(
                [_parameter(n, p) for n, p in thing.named_parameters(remove_duplicate=False)]
            )
            parts["buffers"].append([*thing.named_buffers(remove_duplicate=False)])
            parts["others"].append([(n, m.training) for n, m in thing.named_modules(remove_duplicate=False)])
        elif isinstance(thing, torch.optim.Optimizer):
            parts["optimizers"].append(_optimizer(thing))
        else:
            parts["others"].append(thing)
    parts["losses"] = _LOSSES
    parts["rng_torch"] = [torch.get_rng_state(), torch.initial_seed()]
    parts["rng_numpy"] = np.random.get_state(legacy=False)
    parts["rng_random"] = random.getstate()
    parts["settings"] = [torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()]
    for name, part in parts.items():
        print("digest", name, fingerprint(part))


def fingerprint(thing: object) -> str:
    """Return the sha256 of the raw bytes of nested plain data and tensors, in the order given."""
    hasher = hashlib.sha256()
    _feed(hasher, thing)
    return hasher.hexdigest()


def _parameter(name: str, parameter: torch.nn.Parameter) -> list[object]:
    return [name, parameter, parameter.grad, parameter.requires_grad, parameter._version]


def _optimizer(optimizer: torch.optim.Optimizer) -> list[object]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    members = [p for group in optimizer.param_groups for p in group["params"]]
    return [groups, [[p.shape, optimizer.state.get(p)] for p in members], len(optimizer.state)]


def _feed(hasher: hashlib._Hash, thing: object) -> None:
    hasher.update(type(thing).__name__.encode())
    if isinstance(thing, torch.Tensor):
        _feed_tensor(hasher, thing.detach())
    elif isinstance(thing, np.ndarray):
        hasher.update(f"{thing.dtype}{thing.shape}".encode() + thing.tobytes())
    elif isinstance(thing, dict):
        _feed(hasher, list(thing.items()))
    elif isinstance(thing, list | tuple):
        hasher.update(struct.pack("<q", len(thing)))
        for item in thing:
            _feed(hasher, item)
    elif isinstance(thing, float):
        hasher.update(struct.pack("<d", thing))
    elif isinstance(thing, bytes):
        hasher.update(thing)
    else:
        hasher.update(repr(thing).encode())


def _feed_tensor(hasher: hashlib._Hash, tensor: torch.Tensor) -> None:
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}".encode())
    if tensor.layout is torch.sparse_coo:
        _feed(hasher, [tensor._indices(), tensor._values()])
    else:
        hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
