"""Waits until the script itself imports torch.

clew must not import it first: scripts set threads, devices and seeds in the environment before that line.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def call_after_import(name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Call an action once a module has been imported, at once if it is; return how to call it off."""
    if name in sys.modules:
        action()
        return _do_nothing
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


class _Finder(MetaPathFinder):
    """Finds one module as usual, and wraps its loader to learn when it is ready."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the awaited module with a loader that tells; leave all others to Python."""
        if fullname != self._name:
            return None
        self.remove()
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._action)
        return spec

    def remove(self) -> None:
        """Step out of the import system."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _TellingLoader(Loader):
    """The module's own loader, with one thing to do at the end."""

    def __init__(self, loader: Any, action: Callable[[], object]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, give it its own loader back, then act."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._action()


def _do_nothing() -> None:
    return None
