"""The compiled kernel as the build left it, or None; for those that have no torch. Tensors go by ``compiled``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

BUILT: ModuleType | None
try:
    from clew.stats import _kernel as BUILT
except ImportError:  # no compiler when the package was installed: numpy or torch does the work
    BUILT = None
