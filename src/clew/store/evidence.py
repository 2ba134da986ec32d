"""The evidence of bad steps: plain data and tensors in one safetensors file per step, the data as its metadata."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

FOLDER: Final = "repro"
_NAME: Final = re.compile(r"step-(\d+)\.safetensors")


def write_evidence(rank_folder: Path, step: int, data: bytes) -> None:
    """Keep the evidence of a step, whole or not at all."""
    folder = rank_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.safetensors"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def list_evidence(rank_folder: Path) -> dict[int, Path]:
    """Return the files of a rank by step."""
    folder = rank_folder / FOLDER
    found = (
        [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    )
    return {int(match[1]): path for path, match in found if match}
