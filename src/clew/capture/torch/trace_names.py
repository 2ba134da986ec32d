"""Which module and which tensor has which name while a model is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class NamedTensor:
    """A parameter or buffer with all the names it has in the model."""

    tensor: torch.Tensor
    role: str
    names: list[str]
    owner: str


class ModelNames:
    """Paths of modules and names of parameters and buffers, by identity; the first name found is the name."""

    def __init__(self, root: torch.nn.Module | None) -> None:
        self.paths: dict[int, str] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        self.shared: dict[str, list[str]] = {}
        """The further paths of modules that have several, by the first."""
        self.tensors: dict[int, NamedTensor] = {}
        self.strangers: list[str] = []
        if root is not None:
            self._add_tree(root, "")

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """The further names of tensors that have several, by the first."""
        return {each.names[0]: tuple(each.names[1:]) for each in self.tensors.values() if len(each.names) > 1}

    def add_stranger(self, module: torch.nn.Module, parent: str) -> str:
        """Name a module that the model does not own after its class and its caller, and return its path."""
        path = free = f"{parent}.{type(module).__name__}".lstrip(".")
        number = 0
        while free in self.modules:
            number += 1
            free = f"{path}_{number}"
        self.strangers.append(free)
        self._add_tree(module, free)
        return self.paths[id(module)]

    def _add_tree(self, top: torch.nn.Module, prefix: str) -> None:
        for inner, module in top.named_modules(remove_duplicate=False):
            path = f"{prefix}.{inner}" if prefix and inner else prefix or inner
            if id(module) not in self.paths:
                self.paths[id(module)] = path
                self.modules[path] = module
            else:
                self.shared.setdefault(self.paths[id(module)], []).append(path)
            stem = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._add_tensor(parameter, "param", stem + name, path)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._add_tensor(buffer, "buffer", stem + name, path)

    def _add_tensor(self, tensor: torch.Tensor, role: str, name: str, owner: str) -> None:
        known = self.tensors.get(id(tensor))
        if known is None:
            self.tensors[id(tensor)] = NamedTensor(tensor, role, [name], owner)
        elif name not in known.names:
            known.names.append(name)
