"""An identity that hands the value that passes it out, in the forward and in the backward pass, also under jit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable

    Keep = Callable[[Any], None]


def hand_out(value: Any, keep: Keep) -> None:
    """Give the numbers of a value, now or whenever the code that is traced here runs, to ``keep``."""
    jax.debug.callback(keep, value)


def tap(value: jax.Array, keep: Keep, keep_gradient: Keep) -> jax.Array:
    """Return the value; its numbers go to ``keep``, the gradient that comes back to it to ``keep_gradient``."""
    hand_out(value, keep)
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        return value

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def forward(x: jax.Array) -> tuple[jax.Array, None]:
        return x, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        hand_out(gradient, keep_gradient)
        return (gradient,)

    same.defvjp(forward, backward)
    return same(value)
