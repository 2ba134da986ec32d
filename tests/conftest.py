"""What every test shares: golden files, and the check that nothing of clew stays behind."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent

# Workers of xdist are told the width of the terminal; what clew prints must not depend on where it is tested.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# Tests start many processes, and each would compile clew again where Python is told to keep no bytecode.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell lets its background jobs ignore Ctrl-C, and the programs that tests start would inherit that.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine must not fail a test: no deadlines, and the same examples every time. To search for new ones:
# HYPOTHESIS_PROFILE=explore make test
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_addoption(parser):
    parser.addoption(
        "--golden-rewrite", action="store_true", help="write what was drawn over the golden files"
    )


def pytest_collection_finish():
    """Keep what the imports made out of every search for garbage, which then takes no time at all."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zygote():
    """Return what runs scripts and commands in processes of their own that have torch already: see ``zygote.py``."""
    from zygote import Zygote

    server = Zygote()
    yield server
    server.close()


class HandClock:
    """A clock for the phases of a step: a look at it takes 10 µs, and tests move it on instead of sleeping."""

    def __init__(self):
        self._now = 0.0

    def __call__(self):
        self._now += 1e-5
        return self._now

    def sleep(self, seconds):
        self._now += seconds


@pytest.fixture
def hand_clock(monkeypatch):
    """Return the clock that recordings of this test go by, whatever else the machine is doing."""
    from clew.capture.clock import StepClock

    clock = HandClock()
    monkeypatch.setattr("clew.capture.clock.perf_counter", clock)
    monkeypatch.setattr("clew.capture.torch.recorder.make_clock", StepClock)
    return clock


@pytest.fixture
def golden(request):
    """Return a function that compares text with ``golden/NAME`` beside the test, or rewrites it."""
    folder = Path(request.node.path).parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--golden-rewrite"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {path}: run pytest --golden-rewrite and read what it wrote"
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} differs; if rightly so: pytest --golden-rewrite"
        )

    return compare


def _torch_state():
    """Return everything in torch that clew may hook or replace, or nothing while torch is not loaded."""
    torch = sys.modules.get("torch")
    optimizer = sys.modules.get("torch.optim.optimizer")
    if torch is None or optimizer is None or not hasattr(torch, "compile"):
        return {}
    # An optimizer loads the compiler when it first steps, and loading it replaces functions of torch.
    importlib.import_module("torch._dynamo")
    module = torch.nn.modules.module
    owners = {
        "Module": torch.nn.Module,
        "Optimizer": torch.optim.Optimizer,
        "DataLoader": torch.utils.data.DataLoader,
        "Tensor": torch.Tensor,
        "autograd": torch.autograd,
        "GradScaler": torch.amp.GradScaler,
        "clip_grad": torch.nn.utils.clip_grad,
        "nn.utils": torch.nn.utils,
        "checkpoint": torch.utils.checkpoint,
        "worker": torch.utils.data._utils.worker,
        "torch": torch,
    }
    # Identity of functions alone: classes and lazily imported submodules come and go by themselves.
    state = {
        f"{owner}.{name}": value
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
        if callable(value) and not isinstance(value, type)
    }
    hooks = [
        (module, name) for name in vars(module) if name.startswith("_global_") and name.endswith("hooks")
    ]
    hooks += [(optimizer, name) for name in vars(optimizer) if name.startswith("_global_optimizer_")]
    state.update(
        {f"{name}[{key}]": value for holder, name in hooks for key, value in getattr(holder, name).items()}
    )
    return state


def _threads():
    # The compiler's progress bars start a monitor that lives as long as the process.
    alive = [thread for thread in threading.enumerate() if thread.is_alive()]
    return {thread for thread in alive if type(thread).__module__ != "tqdm._monitor"}


def _wait_for_threads(before):
    """Return the threads that a test started and that do not end by themselves."""
    # Long enough for a busy machine; the test of this check has less patience.
    until = time.monotonic() + float(os.environ.get("THREADS_MAY_TAKE_SECONDS", "60"))
    while (left := _threads() - before) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def leftovers(before, after):
    """Return the names of what was added, removed or replaced between two states of torch."""
    if not before:
        return []
    changed = [name for name in before if after.get(name) is not before[name]]
    return sorted({*changed, *(name for name in after if name not in before and "_global_" in name)})


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves hooks, patched functions, threads or files in the working directory."""
    torch_before, threads_before = _torch_state(), _threads()
    folder = os.getcwd()
    files_before = set(os.listdir(folder))
    streams_before = [dict(vars(stream)) for stream in (sys.__stdout__, sys.__stderr__)]
    yield
    assert os.getcwd() == folder, "the test left the working directory changed"
    assert not leftovers(torch_before, _torch_state()), "torch is not as it was"
    assert not _wait_for_threads(threads_before), "threads are left running"
    made = {name for name in set(os.listdir(folder)) - files_before if name not in _MADE_BY_TOOLS}
    assert not made, "files are left in the working directory"
    streams_after = [dict(vars(stream)) for stream in (sys.__stdout__, sys.__stderr__)]
    assert streams_after == streams_before, "a standard stream is still covered"


_MADE_BY_TOOLS = {".hypothesis", ".mypy_cache", ".ruff_cache", ".import_linter_cache", "__pycache__", ".git"}
