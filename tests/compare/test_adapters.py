"""The tests of the adapters, each framework in a process of its own: JAX objects to every fork after it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("framework", "backend"), [("jax", ""), ("keras", "jax"), ("keras", "torch")])
def test_the_adapter_passes_its_tests(framework, backend):
    script = Path(__file__).with_name(f"own_process_{framework}.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(script)],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # Compiling takes most of the time, and none of it has to be fast code.
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "KERAS_BACKEND": backend},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "[100%]" in done.stdout
