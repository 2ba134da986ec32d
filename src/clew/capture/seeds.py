"""The seeds that a script has set before its first step: of torch, and of the global generators of Python and numpy."""

from __future__ import annotations

import functools
import random
import sys
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.patches import Patches

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST: Final = 200


class SeedWatch:
    """Sees ``random.seed`` and ``numpy.random.seed`` until ``stop``, and keeps the last ones before the first step."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.is_over = False
        """Whether the first step has begun: a seed set later is none of the run's."""
        self._patches = Patches()
        self._patched: set[str] = set()

    def start(self) -> None:
        """Begin to see them; numpy's as soon as there is a numpy, which is not ours to import."""
        self._patch("random", random)
        self.watch_numpy()

    def watch_numpy(self) -> None:
        """Begin to see numpy's seeds, if it is there."""
        module = sys.modules.get("numpy.random")
        if module is not None and hasattr(module, "seed"):
            self._patch("numpy", module)

    def stop(self) -> None:
        """Leave everything as it was found."""
        self._patches.undo()
        self._patched.clear()

    def _patch(self, name: str, module: Any) -> None:
        if name not in self._patched:
            self._patched.add(name)
            self._patches.replace(module, "seed", functools.partial(self._make_seed, name))

    def _make_seed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self.is_over:
                self._note(name, args[0] if args else next(iter(kwargs.values()), None))
            return result

        return seed

    def _note(self, name: str, value: Any) -> None:
        if value is None:  # drawn from the system: whatever was set before does not count any more
            self.found.pop(name, None)
            return
        try:
            self.found[name] = _write(value)
        except Exception:  # noqa: BLE001 - what a seed looks like is not worth an exception in the script's line
            self.found[name] = f"a {type(value).__name__}"


def _write(value: Any) -> Any:
    """Return a seed as data that fits JSON; an array or a text may be long."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, (int, float)):
        return plain
    text = plain if isinstance(plain, str) else repr(plain)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
