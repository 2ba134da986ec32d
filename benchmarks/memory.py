"""Peak memory of a training, plain and recorded, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.modes import MODES, Mode

_STEPS = {"mlp": 300, "loader": 300, "cnn": 30, "gpt": 24}
_ALLOWED_BYTES = 200e6
_ALLOWED_SHARE = 0.05


@dataclass(frozen=True)
class Peak:
    """Peak resident memory of both sides, and the most the recorded side may have."""

    plain_bytes: float
    recorded_bytes: float
    limit_bytes: float


def measure(name: str, mode: Mode, plain_bytes: float, *, threads: int) -> Peak:
    """Run the recorded side and set it against the plain one."""
    recorded = run_apart(name, mode.name, threads=threads)
    copy = recorded["parameter_bytes"] if mode.has_updates else 0.0
    limit = plain_bytes * (1 + _ALLOWED_SHARE) + _ALLOWED_BYTES + copy
    return Peak(plain_bytes, recorded["peak_bytes"], limit)


def run_apart(name: str, mode: str, *, threads: int) -> dict[str, float]:
    """Train in a new process and return its peak memory and the size of its parameters."""
    command = [sys.executable, "-m", "benchmarks.memory", name, mode, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _train(name: str, mode_name: str, threads: int) -> None:
    import torch

    from benchmarks.trainings import make

    torch.set_num_threads(threads)
    training = make(name)
    mode = next((mode for mode in MODES if mode.name == mode_name), None)
    if mode is None:
        _repeat(training, name)
    else:
        import clew

        with (
            tempfile.TemporaryDirectory() as folder,
            clew.watch({name: training.model}, training.optimizer, out=folder, status=False, **mode.settings),
        ):
            _repeat(training, name)
    parameters = sum(p.numel() * p.element_size() for p in training.model.parameters())
    peak = _peak_bytes()
    print(json.dumps({"peak_bytes": peak, "parameter_bytes": parameters}))


def _peak_bytes() -> float:
    """Return the most memory this program had; ``ru_maxrss`` would count the process it was started from, too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * float(status.partition("VmHWM:")[2].split()[0])


def _repeat(training: object, name: str) -> None:
    for _ in range(_STEPS[name]):
        training.step()  # type: ignore[attr-defined]


if __name__ == "__main__":
    _train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
