"""Names of modules and tensors: the parts that wrappers add, and words that frameworks have for one thing."""

from __future__ import annotations

import re
from typing import Final

WRAPPERS: Final = (
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "base_layer",
)
"""Parts of a path that compile, DDP, FSDP, activation checkpointing, fabric and LoRA put between the user's own."""

_ADAPTED: Final = re.compile(r"(^|[./])base_model\.model(?=\.)")
_PARTS: Final = re.compile(r"([./])")

PARAMETER_WORDS: Final = {
    "kernel": "weight",
    "gamma": "weight",
    "scale": "weight",
    "embedding": "weight",
    "embeddings": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "mean": "running_mean",
    "moving_variance": "running_var",
    "var": "running_var",
}
"""What other frameworks call the parameters that PyTorch calls weight, bias and running statistics."""

_TYPE_WORDS: Final = {
    "dense": "linear",
    "embed": "embedding",
    "nondynamicallyquantizablelinear": "linear",
    "groupnormalization": "groupnorm",
    "layernormalization": "layernorm",
    "batchnormalization": "batchnorm",
}
_DIGITS: Final = re.compile(r"\d+[dD]?$")


def unwrap(name: str) -> str:
    """Return the name without the parts that wrappers add, in the optimizer's names too."""
    parts = _PARTS.split(_ADAPTED.sub(r"\1base_model", name))
    kept: list[str] = []
    for index in range(0, len(parts), 2):
        is_last = index == len(parts) - 1
        if is_last or parts[index] not in (*WRAPPERS, "base_model"):
            kept += parts[index : index + 2]
    if kept[-1] in WRAPPERS and len(kept) > 2:
        # A module that is itself the wrapped one stands for what is inside.
        del kept[-2:]
    return "".join(kept)


def short_type(name: str) -> str:
    """Return the kind of a module from its class: ``linear`` for Linear and Dense, ``conv`` for Conv2d and Conv."""
    last = _DIGITS.sub("", name.rpartition(".")[2]).lower().removeprefix("lazy")
    return _TYPE_WORDS.get(last, last)


def own_name(name: str) -> str:
    """Return the last part of a name in PyTorch's word for it."""
    last = name.rpartition(".")[2]
    return PARAMETER_WORDS.get(last, last)


def is_turned_by_name(a: str, b: str) -> bool:
    """Whether the first is a kernel, stored as in, out, and the second a weight, stored as out, in."""
    return a.rpartition(".")[2] == "kernel" and b.rpartition(".")[2] == "weight"


def words_of(name: str) -> frozenset[str]:
    """Return the words of a name, without numbers: ``layers.0.self_attn`` has layers, self and attn."""
    return frozenset(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
