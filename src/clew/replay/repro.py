"""The text of a test made of a bad step: it needs torch and safetensors, and fails until the line is mended."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from clew.replay.words import say

if TYPE_CHECKING:
    from pathlib import Path


def write_test(data: dict[str, Any], *, part: str, target: Path, data_bytes: int, run: str) -> str:
    """Return the text of the test for one part of the evidence: ``module``, ``operation`` or ``tensor``."""
    source = data["verdict"]["source"]
    body = {"module": _MODULE_BODY, "operation": _OPERATION_BODY, "tensor": _TENSOR_BODY}[part]
    fields = {
        "sentence": say(data["verdict"]),
        "run": run,
        "step": data["step"],
        "place": f"{source['file']}:{source['line']}" if source["file"] else "an unknown line",
        "text": source["text"],
        "line": source["line"],
        "hint": data["verdict"].get("hint") or "look at the values that go in",
        "holds": describe_data(data, part=part, data_bytes=data_bytes),
        "data_file": target.with_suffix(".safetensors").name,
        "source_file": _relative(source["file"], target.parent),
        "depth": _depth(data),
        "operation": data.get("operation", {}).get("name", ""),
        "backward": data["verdict"]["phase"] == "backward",
        "what": data.get("tensor", {}).get("what", ""),
    }
    # A recorded text may hold quotes or braces: it goes into comments and literals only, escaped.
    safe = {key: _clean(value) for key, value in fields.items()}
    safe |= {
        f"{key}_literal": repr(str(fields[key])) for key in ("data_file", "source_file", "sentence", "place")
    }
    return (_HEAD + body + _TAIL).format(**safe)


def describe_data(data: dict[str, Any], *, part: str, data_bytes: int) -> str:
    """Return what a data file holds, for the person who may hand it on."""
    size = f"{data_bytes / 1000:,.1f} kB"
    if part == "operation":
        return f"the inputs of one operation, which come from your batch and weights ({size})"
    if part == "tensor":
        tensor = data["tensor"]
        rows = f"row {tensor['rows'][0]} of {tensor['of'][0]} of" if tensor["rows"] else "all of"
        return f"{rows} {tensor['what']} ({size})"
    module = data["module"]
    return f"{module['samples']} of {module['of']} samples that went into {module['name']}, and its weights ({size})"


def _clean(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"""', "'''").replace("\n", " ")


def _depth(data: dict[str, Any]) -> int:
    """Return how many folders the file with the module's class lies below the one that imports start from."""
    home = data.get("module", {}).get("spec", {}).get("class", {}).get("module", "")
    return str(home).count(".")


def _relative(file: str, folder: Path) -> str:
    try:
        return os.path.relpath(file, folder.resolve()) if file else ""
    except ValueError:
        return file


_HEAD: Final = '''"""{sentence}

Made by clew from the run {run}, step {step}. Fails until this line is mended:

    {place}
    {text}

What may help: {hint}.

Beside this file, {data_file} holds {holds}. Think before you hand it on.
"""

import ast
import builtins
import dataclasses
import importlib
import json
import sys
import types
from pathlib import Path

import torch
from safetensors import safe_open

DATA = Path(__file__).with_name({data_file_literal})
SOURCE = Path(__file__).parent / {source_file_literal}


def load():
    """Return the description of the call and its tensors."""
    with safe_open(DATA, framework="pt") as file:
        return json.loads(file.metadata()["clew"]), {{name: file.get_tensor(name) for name in file.keys()}}


class Reader:
    """Turns plain data back into values and modules."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.made = {{}}

    def value(self, data):
        if isinstance(data, list):
            return [self.value(part) for part in data]
        if not isinstance(data, dict):
            return data
        if "tensor" in data:
            name = data["tensor"]
            if name not in self.made:
                self.made[name] = self.tensors[name].clone().requires_grad_(data["grad"])
            return self.made[name]
        (kind, inner), = data.items()
        if kind == "tuple":
            return tuple(self.value(part) for part in inner)
        if kind == "dict":
            return {{key: self.value(part) for key, part in inner}}
        if kind == "float":
            return float(inner)
        if kind == "device":
            return torch.device(inner)
        found = torch
        for part in inner.split("."):
            found = getattr(found, part)
        return found
'''

_MODULE_BODY: Final = '''
    def module(self, spec):
        kind = find_class(spec["class"])
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        for key, data in spec["parameters"].items():
            module.register_parameter(key, None if data is None else self.parameter(data))
        for key, data in spec["buffers"].items():
            module.register_buffer(key, self.value(data))
        for key, child in spec["modules"].items():
            module.add_module(key, None if child is None else self.module(child))
        vars(module).update({{key: self.value(data) for key, data in spec["attributes"].items()}})
        module.training = spec["training"]
        if hasattr(module, "_init_flat_weights"):  # a recurrent layer
            module._init_flat_weights()
        return module

    def parameter(self, data):
        name = data["tensor"]
        if not isinstance(self.made.get(name), torch.nn.Parameter):
            self.made[name] = torch.nn.Parameter(self.tensors[name].clone(), requires_grad=data["grad"])
        return self.made[name]


class Names(dict):
    """The names of a script: what it defines, and what it computes only when that is asked for."""

    def __init__(self, path):
        super().__init__(__name__="script", __file__=str(path), __builtins__=builtins)
        self.path = path
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.rest = {{name: node for node in tree.body for name in assigned(node)}}
        for node in tree.body:
            if isinstance(node, DEFINITIONS):
                self.run(node)

    def run(self, node):
        exec(compile(ast.Module([node], []), str(self.path), "exec"), self)

    def __missing__(self, name):
        if hasattr(builtins, name) or name not in self.rest:
            raise KeyError(name)
        self.run(self.rest.pop(name))
        return self[name]


DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def assigned(node):
    """Return the names that a statement gives a value."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def definitions(path):
    """Return what a script defines, without running it: a value is computed where a definition needs it."""
    script = types.ModuleType("script")
    sys.modules["script"] = script
    vars(script).update(Names(path))
    return script


def find_class(place):
    """Return a class: from the script's own file, or imported from where it lives."""
    if place["module"] == "__main__":
        found = sys.modules.get("script") or definitions(SOURCE)
    else:
        found = importlib.import_module(place["module"])
    for part in place["name"].split("."):
        found = getattr(found, part)
    return found


def leaves(value):
    """Return the tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict) or hasattr(value, "items"):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    if dataclasses.is_dataclass(value):
        return [leaf for field in dataclasses.fields(value) for leaf in leaves(getattr(value, field.name))]
    return []


def test_step_{step}_stays_finite():
    torch.manual_seed(0)
    sys.path.insert(0, str(SOURCE.resolve().parents[{depth}]))
    data, tensors = load()
    call, reader = data["module"], Reader(tensors)
    module = reader.module(call["spec"])
    args, kwargs = reader.value(call["args"]), reader.value(call["kwargs"])
    checked = leaves(module(*args, **kwargs))
    if call["backward"]:
        outputs = [checked[int(index)] for index in call["gradients"]]
        inputs = [leaf for leaf in leaves([args, kwargs]) if leaf.requires_grad]
        wanted = inputs + [each for each in module.parameters() if each.requires_grad]
        given = [reader.value(each) for each in call["gradients"].values()]
        checked = [each for each in torch.autograd.grad(outputs, wanted, given, allow_unused=True) if each is not None]
    assert all(bool(torch.isfinite(each).all()) for each in checked), {sentence_literal}
'''

_OPERATION_BODY: Final = '''

def operation(*args, **kwargs):
    """The operation at fault; in your code it is asked for at {place}."""
    return torch.ops.aten.{operation}(*args, **kwargs)  # mend it here to see what helps, then in your code


def test_step_{step}_stays_finite():
    data, tensors = load()
    call, reader = data["operation"], Reader(tensors)
    with torch.no_grad():
        args, kwargs = reader.value(call["args"]), reader.value(call["kwargs"])
        result = operation(*args, **kwargs)
    results = result if isinstance(result, (list, tuple)) else [result if isinstance(result, torch.Tensor) else args[0]]
    checked = [each for each in results if isinstance(each, torch.Tensor)]
    assert all(bool(torch.isfinite(each).all()) for each in checked), {sentence_literal}
'''

_TENSOR_BODY: Final = '''

def mend(tensor):
    """{what}, as it came in at {place}."""
    return tensor  # mend it here to see what helps, then in your code


def test_step_{step}_stays_finite():
    data, tensors = load()
    checked = mend(Reader(tensors).value(data["tensor"]["value"]))
    assert bool(torch.isfinite(checked).all()), {sentence_literal}
'''

_TAIL: Final = """

if __name__ == "__main__":
    test_step_{step}_stays_finite()
"""
