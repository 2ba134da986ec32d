"""Plain sentences for what comes from outside the model: loaders, checkpoints, pickles, devices, memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from clew.replay.frames import is_user_file

_SIGNALS: Final = {
    "Killed": "most likely memory ran out: use fewer workers, or keep less in each",
    "Bus error": "most likely the shared memory is full: give the container more (--shm-size), or use fewer workers",
}
_PREFIXES: Final = {"module.": "DataParallel or DistributedDataParallel", "_orig_mod.": "torch.compile"}
_MOST_NAMES: Final = 3


def tell_worker(found: re.Match[str], _: Any) -> str:
    """An exception that a worker of a loader has passed on, with the user's line in it."""
    text = found[0]
    lines = [line for line in text.strip().splitlines() if line.strip()]
    frames = re.findall(r'File "(.*?)", line (\d+), in (\S+)', text)
    own = [frame for frame in frames if is_user_file(frame[0])]
    place = f", at {Path(own[-1][0]).name}:{own[-1][1]} in {own[-1][2]}" if own else ""
    return f"in worker process {found[1]} of a loader: {lines[-1].strip()}{place}"


def tell_dead_worker(found: re.Match[str], _: Any) -> str:
    """A worker of a loader that a signal has ended."""
    how = found[1].strip()
    return f"a worker process of a loader ended by a signal ({how}): {_SIGNALS.get(how, 'clew show has its stacks')}"


def tell_checkpoint(found: re.Match[str], _: Any) -> str:
    """Names and shapes in which a checkpoint and a model differ."""
    text = found[0]
    missing = _names_after(text, "Missing key(s) in state_dict: ")
    extra = _names_after(text, "Unexpected key(s) in state_dict: ")
    sizes = re.findall(
        r"size mismatch for (\S+): copying a param with shape (.*?) from checkpoint, .*? is (.*?)\.(?:\n|$)",
        text,
    )
    parts = [f"the model has {_some(missing)} and the checkpoint has not"] if missing else []
    parts += [f"the checkpoint has {_some(extra)} and the model has not"] if extra else []
    parts += [
        f"{name} is {_shape(there)} in the checkpoint and {_shape(here)} in the model"
        for name, there, here in sizes[:_MOST_NAMES]
    ]
    for prefix, maker in _PREFIXES.items():
        if extra and all(name.startswith(prefix) for name in extra):
            parts.append(f"it was saved from a model in {maker}: take '{prefix}' off its names")
    parts = parts or ["the checkpoint and the model differ in names or shapes"]
    return "; ".join(parts) + ". clew ckpt show lists what the file holds"


def tell_memory(found: re.Match[str], _: Any) -> str:
    """How much was asked for when there was none left."""
    asked = re.search(r"allocate ([\d.]+) (\w+)", found.string)
    size = f": {_in_words(asked[1], asked[2])} were asked for at once" if asked else ""
    return f"the memory is full{size}; use a smaller batch, shorter inputs, or activation checkpointing"


def tell_missing_key(error: KeyError, values: list[dict[str, Any]]) -> str:
    """A name that a dictionary of tensors, such as a checkpoint, does not have."""
    key = error.args[0] if error.args else ""
    for value in values:
        if value.get("holds_tensors") and isinstance(key, str) and key not in value["keys"]:
            return f"{value['name']} has no '{key}'; it has {_some(value['keys'])}"
    return ""


def _names_after(text: str, head: str) -> list[str]:
    found = re.search(re.escape(head) + r"(.*?)\.\s", text + "\n", re.DOTALL)
    return re.findall(r'"(.*?)"', found[1]) if found else []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _shape(text: str) -> str:
    return text.replace("torch.Size(", "").rstrip(")")


def _in_words(number: str, unit: str) -> str:
    if unit != "bytes":
        return f"{number} {unit}"
    size, units = float(number), iter(("B", "kB", "MB", "GB", "TB", "PB"))
    name = next(units)
    while size >= 1000 and name != "PB":
        size, name = size / 1000, next(units)
    return f"{size:.3g} {name}"
