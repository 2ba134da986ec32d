"""Tensors that hold minus infinity on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clew.model.record import Site

_KINDS: Final = ("batch", "input", "buffer")


def is_mask(kind: str, stats: Mapping[str, Any], site: Site | None) -> bool:
    """Return whether a tensor that nobody trains holds nothing but zeros and minus infinity: an additive mask."""
    is_still = kind in _KINDS or (kind == "param" and site is not None and not site.trainable)
    is_legal = (
        stats["zero"] + stats["neg_inf"] == stats["count"] and not stats["nan"] and not stats["pos_inf"]
    )
    return bool(is_still and is_legal)
