"""The states of the random generators, copied in a microsecond and put back when a step is executed again.

``random.getstate`` and ``numpy.random.get_state`` build Python objects and cost up to 0.1 ms a call. Their Mersenne
twisters are plain memory, so a step copies that instead; where the memory does not look as expected, the slow way is
taken.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, Final, NamedTuple

import torch

_WORDS: Final = 624
_BYTES: Final = 4 * (_WORDS + 1)


class RandomBytes(NamedTuple):
    """The states of torch, Python (with its spare normal number) and numpy as plain memory."""

    torch: bytes
    python: bytes
    gauss: float | None
    numpy: bytes

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


class RandomStates:
    """The states of torch, Python and numpy at one moment."""

    def __init__(self) -> None:
        self._torch: torch.Tensor | None = None
        self._python = _Python()
        self._numpy = _Numpy()

    def take(self) -> None:
        """Copy the states as they are now."""
        self._torch = torch.default_generator.get_state()
        self._python.take()
        self._numpy.take()

    def export(self) -> RandomBytes:
        """Return the copied states as bytes, each empty where there is none or it is not plain memory."""
        words = b"" if self._torch is None else bytes(self._torch.numpy().data)
        return RandomBytes(words, *self._python.export(), self._numpy.export())

    def restore(self) -> None:
        """Put the copied states back."""
        if self._torch is not None:
            torch.default_generator.set_state(self._torch)
        self._python.restore()
        self._numpy.restore()


class _Python:
    """The generator behind the functions of ``random``: an index and the words, right after the object's head."""

    def __init__(self) -> None:
        self._copy = ctypes.create_string_buffer(_BYTES)
        self._instance: Any = getattr(random, "_inst", None)
        self._address = id(self._instance) + object.__basicsize__
        self._gauss: float | None = None
        self._slow: Any = None
        self._is_taken = False
        self._is_fast = self._instance is not None and self._looks_right()

    def take(self) -> None:
        self._is_taken = True
        if self._is_fast:
            ctypes.memmove(self._copy, self._address, _BYTES)
            self._gauss = self._instance.gauss_next
        else:
            self._slow = random.getstate()

    def restore(self) -> None:
        if self._is_taken:
            random.setstate(self._state() if self._is_fast else self._slow)

    def export(self) -> tuple[bytes, float | None]:
        return (self._copy.raw, self._gauss) if self._is_taken and self._is_fast else (b"", None)

    def _state(self) -> tuple[int, tuple[int, ...], float | None]:
        words = memoryview(self._copy.raw).cast("I")
        return (random.Random.VERSION, (*words[1:], words[0]), self._gauss)

    def _looks_right(self) -> bool:
        if sys.implementation.name != "cpython" or self._instance.__sizeof__() < _BYTES:
            return False
        ctypes.memmove(self._copy, self._address, _BYTES)
        self._gauss = self._instance.gauss_next
        return self._state() == random.getstate()


class _Numpy:
    """The generator behind the functions of ``numpy.random``; its address is part of numpy's interface."""

    def __init__(self) -> None:
        self._copy = ctypes.create_string_buffer(_BYTES)
        self._address = 0
        self._is_taken = False

    def take(self) -> None:
        if not self._address and not self._find():
            return
        ctypes.memmove(self._copy, self._address, _BYTES)
        self._is_taken = True

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

    def _find(self) -> bool:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return False
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return False
        self._address = int(generator.ctypes.state_address)
        ctypes.memmove(self._copy, self._address, _BYTES)
        known = numpy.random.get_state()
        words, position = self._state()
        if position != known[2] or bytes(words) != bytes(known[1]):
            self._address = 0
        return bool(self._address)
