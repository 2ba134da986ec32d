"""The check that nothing stays behind can fail: each kind of leftover is made on purpose in another pytest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import sys, threading, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
"""

BODIES = {
    "clean": "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()",
    "global_hook": "torch.nn.modules.module.register_module_forward_hook(lambda *a: None)",
    "optimizer_hook": "register_optimizer_step_post_hook(lambda *a: None)",
    "patched_method": "torch.nn.Module._call_impl = lambda self, *a: None",
    "patched_function": "torch.autograd.backward = lambda *a: None",
    "thread": "threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
    "file": "open('left.txt', 'w').close()",
    "covered_stream": "sys.__stderr__.write = sys.__stderr__.write",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return how each body fared under this suite's own conftest."""
    root = tmp_path_factory.mktemp("leftovers")
    folder = root / "tests"
    folder.mkdir()
    conftest = Path(__file__).parents[1] / "conftest.py"
    (folder / "conftest.py").write_text(conftest.read_text(encoding="utf-8"))
    tests = [f"def test_{name}():\n    {body}\n" for name, body in BODIES.items()]
    (folder / "test_it.py").write_text(HEAD + "\n".join(tests))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests",
    ]
    environment = os.environ | {"THREADS_MAY_TAKE_SECONDS": "0.1"}
    done = subprocess.run(
        command, check=False, cwd=root, capture_output=True, text=True, timeout=300, env=environment
    )
    found = re.findall(r"^(\w+) tests/test_it.py::test_(\w+)", done.stdout, re.MULTILINE)
    return set(found)


@pytest.mark.parametrize("name", BODIES)
def test_a_leftover_is_an_error_and_a_clean_test_is_none(outcomes, name):
    assert ("PASSED", name) in outcomes
    assert (("ERROR", name) in outcomes) == (name != "clean")
