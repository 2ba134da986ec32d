"""Attention weights of any model, from one forward pass that changes nothing in it.

Seen are ``nn.MultiheadAttention``, ``F.scaled_dot_product_attention`` and attention written by hand: a softmax
over the last dimension whose result is multiplied with the values. Fused kernels never build the weights, so
they are worked out again beside the kernel from what it was given; dropout is left out.
"""

from __future__ import annotations

import inspect
import math
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from clew.capture.torch.patches import Patches
from clew.capture.torch.trace_restore import eager, unchanged
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

_SOFTMAX: Final = frozenset({torch.softmax, F.softmax, torch.Tensor.softmax})
_PRODUCTS: Final = frozenset(
    {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.einsum}
)
_PASSES: Final = frozenset(
    {F.dropout, torch.dropout, torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as, torch.Tensor.float,
     torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.contiguous, torch.Tensor.nan_to_num, torch.nan_to_num,
     torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.mul, torch.mul, torch.Tensor.__mul__}
)  # fmt: skip
"""What may happen to attention weights between the softmax and the product without their being others."""

_SDPA_ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """The weights of one attention, (batch, head, query, key); ``how`` tells where they come from."""

    site: str
    how: str
    weights: NDArray[np.float32]


def record_attention(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_wanted: Callable[[str], bool],
    heads: tuple[int, ...] | None,
) -> tuple[list[AttentionRecord], list[str]]:
    """Run a model once and return the weights of the wanted sites, and the sites of all attention it has."""
    module = getattr(model, "_orig_mod", model)
    modules = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
    lens = _Lens({id(each): name for name, each in modules.items()}, is_wanted, heads)
    patches = Patches()
    with ExitStack() as stack:
        stack.enter_context(unchanged(list(modules.values())))
        stack.enter_context(eager())
        stack.enter_context(torch.no_grad())
        stack.callback(patches.undo)
        patches.replace(torch.nn.Module, "_call_impl", lens.wrap_module_call)
        stack.enter_context(lens)
        module(*args, **kwargs)
    return lens.records, lens.sites


class _Lens(TorchFunctionMode):
    """Looks for attention among the functions of a forward pass."""

    def __init__(
        self, paths: dict[int, str], is_wanted: Callable[[str], bool], heads: tuple[int, ...] | None
    ) -> None:
        super().__init__()
        self.paths = paths
        self.records: list[AttentionRecord] = []
        self.sites: list[str] = []
        self._is_wanted = is_wanted
        self._heads = heads
        self._stack = [""]
        self._calls: dict[str, int] = {}
        self._candidates: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def wrap_module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module call that keeps track of which module is running."""

        def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._stack.append(self.paths.get(id(module), self._stack[-1]))
            try:
                return original(module, *args, **kwargs)
            finally:
                self._stack.pop()

        return call_module

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            self._see_product(args)
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._add("scaled_dot_product_attention", lambda: weights_of_sdpa(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self._add("MultiheadAttention", lambda: _weights_of_multihead(args, kwargs))
        elif func in _SOFTMAX:
            self._see_softmax(args, kwargs, result)
        elif func in _PASSES:
            self._see_pass(args, result)
        return result

    def _see_softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if result.ndim >= 3 and dim in (-1, result.ndim - 1):
            self._candidates[id(result)] = weakref.ref(result), result

    def _see_pass(self, args: tuple[Any, ...], result: Any) -> None:
        for given in args[:2]:
            weights = self._candidate(given)
            if weights is not None and isinstance(result, torch.Tensor) and result.numel() == weights.numel():
                self._candidates[id(result)] = weakref.ref(result), weights

    def _see_product(self, args: tuple[Any, ...]) -> None:
        for given in args if args and isinstance(args[0], str) else args[:1]:
            weights = self._candidate(given)
            if weights is not None:
                self._candidates = {
                    key: entry for key, entry in self._candidates.items() if entry[1] is not weights
                }
                self._add("softmax", lambda weights=weights: weights)  # type: ignore[misc]

    def _candidate(self, tensor: Any) -> torch.Tensor | None:
        entry = self._candidates.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _add(self, how: str, compute: Callable[[], torch.Tensor]) -> None:
        site = self._name_site(how)
        self.sites.append(site)
        if not self._is_wanted(site):
            return
        weights = compute().detach().float()
        while weights.ndim < 4:
            # Without a batch, (head, query, key); a product of matrices alone tells of one head.
            weights = weights.unsqueeze(0 if weights.ndim < 3 or how == "MultiheadAttention" else 1)
        if weights.ndim > 4:
            weights = weights.flatten(0, weights.ndim - 4)
        if self._heads is not None:
            weights = weights[:, _check_heads(self._heads, weights.shape[1], site)]
        self.records.append(AttentionRecord(site, how, weights.cpu().numpy()))

    def _name_site(self, how: str) -> str:
        path = self._stack[-1] or how
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        return path if call == 0 else f"{path}#{call}"


def _check_heads(heads: tuple[int, ...], count: int, site: str) -> list[int]:
    wrong = [head for head in heads if not 0 <= head < count]
    if wrong:
        raise UsageError(
            f"there is no head {wrong[0]}", where=site, next_step=f"heads go from 0 to {count - 1}"
        )
    return list(heads)


def weights_of_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the weights that ``F.scaled_dot_product_attention`` gives these arguments, in float32.

    A query that may look at nothing gets zeros, as it does from torch.
    """
    given = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
    query, key = given["query"].detach().float(), given["key"].detach().float()
    if given.get("enable_gqa"):
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = given.get("scale")
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if given.get("is_causal"):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    mask = given.get("attn_mask")
    if mask is not None:
        is_choice = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_choice else scores + mask.detach().float()
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


def _weights_of_multihead(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Ask torch's own function again, this time for the weights of each head."""
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.arguments.update(need_weights=True, average_attn_weights=False, dropout_p=0.0, training=False)
    weights: torch.Tensor = F.multi_head_attention_forward(*bound.args, **bound.kwargs)[1]  # type: ignore[assignment]

    return weights
