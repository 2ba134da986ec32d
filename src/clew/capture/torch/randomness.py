"""The states of the random generators, copied in a microsecond and put back when a step is executed again.

``random.getstate`` and ``numpy.random.get_state`` build Python objects and cost up to 0.1 ms a call, that of torch a
tensor. Their Mersenne twisters are plain memory, so a step copies that instead; where the memory does not look as
expected, the slow way is taken.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from clew.stats.readable import undisturbed
from clew.stats.rows import KERNEL

_WORDS: Final = 624
_BYTES: Final = 4 * (_WORDS + 1)
_TORCH_BYTES: Final = 8 + 3 * 4 + 4 * _WORDS + 28
"""Seed, counters and words of a generator of torch, and the spare normal numbers behind them."""
_HEAD_BYTES: Final = 256
_SEED: Final = 0x0C1E_57A7_E0DD_5EED


class RandomBytes(NamedTuple):
    """The states of torch, Python (with its spare normal number) and numpy as plain memory."""

    torch: bytes
    python: bytes
    gauss: float | None
    numpy: bytes

    def export(self) -> RandomBytes:
        """Return the states as they are."""
        return self

    def restore(self) -> None:
        """Put the states into the generators of this process."""
        if self.torch:
            torch.default_generator.set_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.python:
            words = memoryview(self.python).cast("I")
            random.setstate((random.Random.VERSION, (*words[1:], words[0]), self.gauss))
        if self.numpy:
            import numpy as np

            found = np.frombuffer(self.numpy, np.uint32)
            np.random.set_state(("MT19937", found[:_WORDS], int(found[_WORDS]), 0, 0.0))


class RandomMemory(NamedTuple):
    """The same as it lies in memory, torch's too: it is kept for every batch and needed for few."""

    torch: bytes
    python: bytes
    gauss: float | None
    numpy: bytes

    def export(self) -> RandomBytes:
        """Return the states as torch tells them."""
        own = torch.Generator()
        ctypes.memmove(_locate(own) + _find_in_generator(), self.torch, _TORCH_BYTES)
        return RandomBytes(bytes(own.get_state().numpy().data), self.python, self.gauss, self.numpy)


class RandomStates:
    """The states of torch, Python and numpy at one moment."""

    def __init__(self) -> None:
        self._torch = _Torch()
        self.python = _Python()
        self._numpy = _Numpy()
        self._blocks: tuple[int, ...] = ()
        self.packed = b""
        """Where the states lie in memory, and where their copies go."""
        self.is_fast = False
        """Whether that is all there is to copy, but for the spare number of Python's."""

    def take(self) -> None:
        """Copy the states as they are now."""
        if self.is_fast and KERNEL is not None:
            KERNEL.copy_memory(self.packed)
            self.python.gauss = self.python.instance.gauss_next
            return
        if not self._blocks:
            self._prepare()
        _copy(*self._blocks)
        self._torch.take()
        self.python.take()
        self._numpy.take()

    def _prepare(self) -> None:
        self._numpy.find()
        parts = (self._torch, self.python, self._numpy)
        self._blocks = tuple(number for part in parts for number in part.block())
        for part in parts:
            part.take()
        self.is_fast = all(part.block() for part in parts)
        self.packed = array("Q", self._blocks).tobytes()

    def is_same(self, other: RandomStates) -> bool:
        """Return whether nothing was drawn between two moments."""
        if self.is_fast and other.is_fast and KERNEL is not None:
            is_equal = KERNEL.has_same_copies(self.packed, other.packed)
            return is_equal and self.python.gauss == other.python.gauss
        return (
            self._torch.raw() == other._torch.raw()
            and self.python.export() == other.python.export()
            and self._numpy.export() == other._numpy.export()
        )

    def export(self) -> RandomBytes:
        """Return the copied states as bytes, each empty where there is none or it is not plain memory."""
        return RandomBytes(self._torch.export(), *self.python.export(), self._numpy.export())

    def keep(self) -> RandomBytes | RandomMemory:
        """Return the copied states in the shape that takes the least time."""
        if not self.is_fast:
            return self.export()
        return RandomMemory(self._torch.raw(), *self.python.export(), self._numpy.export())

    def restore(self) -> None:
        """Put the copied states back."""
        self._torch.restore()
        self.python.restore()
        self._numpy.restore()


def _copy(*blocks: int) -> None:
    """Copy stretches of memory, each given as where to, where from and how many bytes."""
    if KERNEL is not None:
        KERNEL.copy_memory(array("Q", blocks).tobytes())
        return
    for at in range(0, len(blocks), 3):
        ctypes.memmove(*blocks[at : at + 3])


def _locate(generator: torch.Generator) -> int:
    """Return the address of what a generator stands for, 0 where it does not tell."""
    return int(getattr(generator, "_cdata", 0))


@lru_cache(maxsize=1)
def _find_in_generator() -> int:
    """Return where the state lies in the memory of torch's generators, 0 where it is not found as expected."""
    first, second = torch.Generator(), torch.Generator()
    first.manual_seed(_SEED)
    if not _locate(first):
        return 0
    place = ctypes.string_at(_locate(first), _HEAD_BYTES).find(_SEED.to_bytes(8, sys.byteorder))
    if place <= 0:
        return 0
    with undisturbed():
        for dtype in (torch.float32, torch.float64):  # an odd number of them leaves a spare one
            torch.randn(3, dtype=dtype, generator=first)
        ctypes.memmove(_locate(second) + place, _locate(first) + place, _TORCH_BYTES)
        is_state = torch.equal(first.get_state(), second.get_state())
        drawn = [torch.randn(3, generator=each).tolist() for each in (first, second)]
    return place if is_state and drawn[0] == drawn[1] else 0


class _Torch:
    """The generator behind the random functions of torch. Its memory goes back through a generator of our own."""

    def __init__(self) -> None:
        self._copy = ctypes.create_string_buffer(_TORCH_BYTES)
        self._place = _find_in_generator()
        self._own = torch.Generator()
        self._slow: torch.Tensor | None = None
        self._is_taken = False

    def block(self) -> tuple[int, ...]:
        if not self._place:
            return ()
        return ctypes.addressof(self._copy), _locate(torch.default_generator) + self._place, _TORCH_BYTES

    def take(self) -> None:
        self._is_taken = True
        if not self._place:
            self._slow = torch.default_generator.get_state()

    def raw(self) -> bytes:
        return self._copy.raw if self._place else self.export()

    def _state(self) -> torch.Tensor | None:
        if not self._place or not self._is_taken:
            return self._slow
        ctypes.memmove(_locate(self._own) + self._place, self._copy, _TORCH_BYTES)
        return self._own.get_state()

    def export(self) -> bytes:
        state = self._state()
        return b"" if state is None else bytes(state.numpy().data)

    def restore(self) -> None:
        state = self._state()
        if state is not None:
            torch.default_generator.set_state(state)


class _Python:
    """The generator behind the functions of ``random``: an index and the words, right after the object's head."""

    def __init__(self) -> None:
        self._copy = ctypes.create_string_buffer(_BYTES)
        self.instance: Any = getattr(random, "_inst", None)
        self._address = id(self.instance) + object.__basicsize__
        self.gauss: float | None = None
        self._slow: Any = None
        self._is_taken = False
        self._is_fast = self.instance is not None and self._looks_right()

    def block(self) -> tuple[int, ...]:
        return (ctypes.addressof(self._copy), self._address, _BYTES) if self._is_fast else ()

    def take(self) -> None:
        self._is_taken = True
        if self._is_fast:
            self.gauss = self.instance.gauss_next
        else:
            self._slow = random.getstate()

    def restore(self) -> None:
        if self._is_taken:
            random.setstate(self._state() if self._is_fast else self._slow)

    def export(self) -> tuple[bytes, float | None]:
        return (self._copy.raw, self.gauss) if self._is_taken and self._is_fast else (b"", None)

    def _state(self) -> tuple[int, tuple[int, ...], float | None]:
        words = memoryview(self._copy.raw).cast("I")
        return (random.Random.VERSION, (*words[1:], words[0]), self.gauss)

    def _looks_right(self) -> bool:
        if sys.implementation.name != "cpython" or self.instance.__sizeof__() < _BYTES:
            return False
        ctypes.memmove(self._copy, self._address, _BYTES)
        self.gauss = self.instance.gauss_next
        return self._state() == random.getstate()


class _Numpy:
    """The generator behind the functions of ``numpy.random``; its address is part of numpy's interface."""

    def __init__(self) -> None:
        self._copy = ctypes.create_string_buffer(_BYTES)
        self._address = 0
        self._is_taken = False

    def block(self) -> tuple[int, ...]:
        return (ctypes.addressof(self._copy), self._address, _BYTES) if self._address else ()

    def take(self) -> None:
        self._is_taken = self._address != 0

    def restore(self) -> None:
        if self._is_taken:
            import numpy as np

            np.random.set_state(("MT19937", *self._state(), 0, 0.0))

    def export(self) -> bytes:
        return self._copy.raw if self._is_taken else b""

    def _state(self) -> tuple[Any, int]:
        import numpy as np

        words = np.frombuffer(self._copy.raw, np.uint32)
        return words[:_WORDS], int(words[_WORDS])

    def find(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return
        self._address = int(generator.ctypes.state_address)
        ctypes.memmove(self._copy, self._address, _BYTES)
        known = numpy.random.get_state()
        words, position = self._state()
        if position != known[2] or bytes(words) != bytes(known[1]):
            self._address = 0
