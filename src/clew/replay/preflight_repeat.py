"""Checks of the rehearsal that do the same again: twice, after loading a checkpoint, compiled; and what it costs."""

from __future__ import annotations

import hashlib
import io
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.leaves import walk
from clew.model.preflight import Check
from clew.replay.fork import run_forked
from clew.replay.preflight_samples import replace_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from clew.replay.preflight_subject import Subject

_PATIENCE_SECONDS: Final = 30.0
_COMPILE_SECONDS: Final = {"aot_eager": 20.0, "inductor": 30.0}
_CLOSE: Final = 1e-5
_COMPILED_CLOSE: Final = 1e-2
_TIMED_STEPS: Final = 5


def check_repeatable(subject: Subject) -> Check:
    """Execute two steps in two copies of the process: they must end with the same weights."""
    name = "repeat"

    def run() -> list[Any]:
        subject.rewind()
        losses = [loss for _ in range(2) for loss in subject.run().losses]
        return [losses, fingerprint(subject.parameters)]

    answers = [run_forked(run, seconds=_PATIENCE_SECONDS) for _ in range(2)]
    for answer in answers:
        if answer.trouble:
            return Check(name, "not checked", answer.trouble)
    one, other = (answer.value for answer in answers)
    if one == other:
        return Check(name, "ok", "two steps from the same state give the same bits")
    evidence = {"losses": one[0][:4], "again": other[0][:4]}
    first = next((a for a, b in zip(one[0], other[0], strict=False) if a != b), None)
    text = "the losses differ" if first is not None else "the losses agree, the weights differ"
    hint = "something depends on the time, on addresses, on threads, or draws from a generator without a seed"
    return Check(name, "warning", f"from the same state: {text}", hint, evidence)


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the exact bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()


# ------------------------------------------------------------------------ resume


def check_resume(subject: Subject) -> Check:
    """Save after one step in one copy, load in another that never made it: the next step must be the same."""
    name = "resume"
    with tempfile.TemporaryFile() as file:

        def go_on() -> list[Any]:
            subject.rewind()
            subject.run()
            file.write(_pack(subject))
            file.flush()
            return _step_on(subject)

        def resume() -> list[Any]:
            subject.rewind()
            file.seek(0)
            _unpack(subject, file.read())
            return _step_on(subject)

        answers = [run_forked(action, seconds=_PATIENCE_SECONDS) for action in (go_on, resume)]
    for answer, what in zip(answers, ("saving", "loading"), strict=True):
        if answer.trouble:
            hint = "state_dict() of model and optimizer must go through torch.save and load_state_dict"
            return Check(name, "failed", f"{what} fails: {answer.trouble}", hint)
    (loss, weights), (again, resumed) = (answer.value for answer in answers)
    evidence = {"loss": loss, "resumed": again}
    if _differ(loss, again):
        text = f"the next loss is {again:.6g} after resuming, {loss:.6g} without"
        hint = (
            "something the model computes with is not in its state_dict: plain tensors, counters, attributes"
        )
        return Check(name, "failed", text, hint, evidence)
    if any(_differ(a, b) for a, b in zip(weights, resumed, strict=True)):
        hint = "the optimizer keeps state outside of its state_dict, or the loop keeps some of its own"
        return Check(name, "failed", "the next loss agrees, the weights after it differ", hint, evidence)
    return Check(name, "ok", "a step after save and load is the same as without", evidence=evidence)


def _pack(subject: Subject) -> bytes:
    buffer = io.BytesIO()
    models = [model.state_dict() for model in subject.models]
    torch.save({"models": models, "optimizers": [each.state_dict() for each in subject.optimizers]}, buffer)
    return buffer.getvalue()


def _unpack(subject: Subject, data: bytes) -> None:
    # These bytes were made by this very process a moment ago: they hold nothing that was not here already.
    kept = torch.load(io.BytesIO(data), weights_only=False)
    for model, state in zip(subject.models, kept["models"], strict=True):
        model.load_state_dict(state)
    for optimizer, state in zip(subject.optimizers, kept["optimizers"], strict=True):
        optimizer.load_state_dict(state)


def _step_on(subject: Subject) -> list[Any]:
    losses = subject.run().losses
    sums = [float(parameter.detach().double().abs().sum()) for parameter in subject.parameters]
    return [sum(losses) if losses else math.nan, sums]


def _differ(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) != math.isnan(other)
    return abs(one - other) > _CLOSE * max(abs(one), abs(other), 1e-12)


# ------------------------------------------------------------------------ torch.compile


def check_compiled(subject: Subject) -> Check:
    """Compile the model and compare its outputs and gradients with those of eager mode."""
    name = "compile"
    if not subject.roots:
        return Check(name, "not checked", "no call of a model was seen")
    # What the capture of the graph alone changes is known in seconds; the C++ compiler takes its time.
    captured = _judge_backend(subject, "aot_eager")
    if captured.status != "ok":
        return captured
    if not (os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++", "c++")))):
        why = "the captured graph agrees; for the rest torch.compile needs a C++ compiler, and there is none"
        return Check(name, "not checked", why, evidence=captured.evidence)
    return _judge_backend(subject, "inductor")


def _judge_backend(subject: Subject, backend: str) -> Check:
    name = "compile"
    patience = _COMPILE_SECONDS[backend]
    folder = tempfile.mkdtemp(prefix="clew-preflight-")
    try:
        answer = run_forked(lambda: _compare_compiled(subject, folder, backend), seconds=patience)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if answer.trouble.startswith("no answer"):
        return Check(name, "not checked", f"compiling took more than {patience:.0f} s")
    if answer.trouble:
        hint = "run it without torch.compile, or see what it does not support"
        return Check(name, "warning", f"it cannot be compiled: {answer.trouble.splitlines()[0][:200]}", hint)
    worst: float = answer.value
    evidence = {"relative_difference": worst, "backend": backend}
    if worst > _COMPILED_CLOSE:
        hint = (
            "the model does something else under torch.compile: side effects, state, or a branch of its own"
        )
        return Check(name, "failed", f"outputs or gradients differ by {worst:.1%}", hint, evidence)
    return Check(name, "ok", "outputs and gradients of the compiled model agree", evidence=evidence)


def _compare_compiled(subject: Subject, folder: str, backend: str) -> float:
    warnings.simplefilter("ignore")  # what the compiler itself is warned of is not the user's to mend
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = folder
    tempfile.tempdir = folder
    from torch._inductor import config

    config.compile_threads = 1
    config.fx_graph_cache = False
    subject.rewind()
    call = subject.roots[0]
    module = getattr(call.module, "_orig_mod", call.module)
    module.eval()
    eager = _run_once(subject, module, call)
    # A second call: what changes from call to call is no fault of the compiler's, and is left out below.
    again = _run_once(subject, module, call)
    compiled: Any = torch.compile(module, backend=backend)
    fresh = _run_once(subject, compiled, call)
    pairs = zip(eager, again, fresh, strict=True)
    return max((_relative(a, c) for a, b, c in pairs if _relative(a, b) == 0), default=0.0)


def _run_once(subject: Subject, module: Any, call: Any) -> list[torch.Tensor]:
    subject.random()
    for parameter in subject.parameters:
        parameter.grad = None
    args, kwargs = replace_tensors((call.args, call.kwargs), lambda leaf: leaf.detach())
    outputs = [leaf for _, leaf in walk(module(*args, **kwargs)) if leaf.is_floating_point()]
    sums = [leaf.float().square().mean() for leaf in outputs if leaf.requires_grad]
    if sums:
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in subject.parameters if parameter.grad is not None]
    return [leaf.detach().clone() for leaf in (*outputs, *gradients)]


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    scale = float(one.double().abs().max()) or 1.0
    difference = float((one.double() - other.double()).abs().max())
    return difference / scale if math.isfinite(difference) else 0.0 if torch.equal(one, other) else math.inf


# ------------------------------------------------------------------------ what it costs


def check_cost(subject: Subject) -> Check:
    """Time some steps and say what the whole run will take."""
    subject.rewind()
    times = []
    for _ in range(_TIMED_STEPS + 1):
        started = time.perf_counter()
        subject.run()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[1:]) + _fetching_seconds(subject.loader)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    evidence = {"step_seconds": seconds, "memory_bytes": memory, "steps": subject.total_steps}
    text = f"{_duration(seconds)} a step, {memory / 1e9:.2g} GB of memory in this process"
    if subject.total_steps:
        text += f"; {subject.total_steps:,} steps take {_duration(seconds * subject.total_steps)}"
    limit = _memory_of_machine()
    if limit and memory > 0.9 * limit:
        return Check("cost", "warning", text, f"the machine has {limit / 1e9:.2g} GB", evidence)
    return Check("cost", "ok", text, evidence=evidence)


def _fetching_seconds(loader: Any) -> float:
    """Return what a batch costs the training process: nothing where workers fetch it meanwhile."""
    if loader is None or loader.num_workers:
        return 0.0
    times = []
    iterator = iter(loader)
    for _ in range(_TIMED_STEPS):
        started = time.perf_counter()
        if next(iterator, None) is None:
            break
        times.append(time.perf_counter() - started)
    return statistics.median(times) if times else 0.0


def _memory_of_machine() -> int:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemTotal")), 0)


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"


REPEATS: Final[dict[str, Callable[[Subject], Check]]] = {
    "repeat": check_repeatable,
    "resume": check_resume,
    "compile": check_compiled,
}
"""Checks that make their own copies of the process."""
