"""A standalone test made of a recorded fault."""

from __future__ import annotations

import json
import runpy
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clew.errors import RunBroken, UsageError
from clew.replay.repro import describe_data, write_test
from clew.store.evidence import list_evidence
from clew.store.layout import list_ranks, rank_folder

if TYPE_CHECKING:
    from clew.query import Run
    from clew.replay.process import Child


class Repro(NamedTuple):
    """What was written: the test, its data, what kind of test it is, and what the data holds."""

    test: Path
    data: Path
    part: str
    holds: str
    reasons: tuple[str, ...]


def write_repro(
    run: Run, target: Path, *, step: int | None = None, operation: bool = False, site: str = ""
) -> Repro:
    """Write a test of a run's bad step and the data beside it.

    The module at fault is taken if it can be built from the user's own file, else the single operation; for a value
    that came in bad, the row of the batch or the weight. Each is executed once before it is written, and must fail. A
    step of which nothing was kept is executed again for it; ``site`` asks for the test of one module.
    """
    if target.suffix != ".py":
        raise UsageError(f"'{target}' is no name for a test", next_step="write -o test_nan.py")
    beside = target.with_suffix(".safetensors")
    for path in (target, beside):
        if path.exists():
            raise UsageError(f"'{path}' is there already", next_step="choose another name with -o")
    evidence = _find_evidence(run, step, site=site)
    whole = evidence.read_bytes()
    data = _read_data(evidence, whole)
    reasons = list(data.get("reasons", ()))
    parts = ("module",) if site else ("operation",) if operation else ("module", "operation", "tensor")
    for part in parts:
        if part not in data:
            continue
        blob = _take_part(whole, data, part)
        text = write_test(data, part=part, target=target, data_bytes=len(blob), run=run.name)
        problem = _try_out(text, blob, target)
        if not problem:
            _write(target, text, beside, blob)
            holds = describe_data(data, part=part, data_bytes=len(blob))
            return Repro(target, beside, part, holds, tuple(reasons))
        reasons.append(f"{part}: the test did not fail as it should: {problem}")
    raise UsageError(
        f"no test can be made of step {data['step']}",
        where="; ".join(reasons) or str(evidence),
        next_step=f"clew why {run.name} says what happened",
    )


def _find_evidence(run: Run, step: int | None, *, site: str) -> Path:
    found = _list_all(run)
    wanted = step if step is not None else min(found, default=None) if site else None
    if wanted is not None and (run.info.is_script or run.info.watch) and (site or wanted not in found):
        _make_evidence(run, wanted, site)
        found = _list_all(run)
    if step is None and found:
        return found[min(found)]
    if step not in found:
        steps = f"there is some of step {', '.join(map(str, found))}" if found else "none was kept"
        raise UsageError(
            "no evidence of a bad step is in this run"
            if step is None
            else f"no evidence of step {step}: {steps}",
            where=str(run.path),
            next_step="it is kept when 'clew run' or clew.watch sees a loss, gradient or weight go bad",
        )
    return found[step]


def _list_all(run: Run) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for rank in reversed(list_ranks(run.path)):
        found.update(list_evidence(rank_folder(run.path, rank)))
    return found


def _make_evidence(run: Run, step: int, site: str) -> None:
    """Execute the step again to have its evidence, or that of one module, in the run."""
    from clew.api.why import explain_again

    if step > run.last_step:
        return
    if site:
        run.find(site)  # a name that is not there is told with the nearest one
    verdict = explain_again(run, step, site=site)
    if not verdict["found"]:
        raise UsageError(
            f"nothing in step {step} is NaN or infinite, so there is nothing to test",
            where=str(run.path),
            next_step=f"clew why {run.name} names the step that went bad",
        )


def _read_data(path: Path, blob: bytes) -> dict[str, Any]:
    """Return the description in the header of the file; nothing else of it is looked at here."""
    try:
        (length,) = struct.unpack("<Q", blob[:8])
        data: dict[str, Any] = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["clew"])
        if not isinstance(data["verdict"]["source"], dict) or not isinstance(data["step"], int):
            raise TypeError("no verdict")
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise RunBroken(f"the evidence cannot be read: {error}", where=str(path)) from error
    return data


def _take_part(blob: bytes, data: dict[str, Any], part: str) -> bytes:
    """Return the file with the tensors and the description of one part alone: no data beyond what the test needs."""
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    body = blob[8 + length :]
    kept: dict[str, Any] = {}
    pieces: list[bytes] = []
    position = 0
    for name, entry in header.items():
        if name == "__metadata__" or (part != "tensor" and name.startswith("op.") != (part == "operation")):
            continue
        start, end = entry["data_offsets"]
        pieces.append(body[start:end])
        kept[name] = {**entry, "data_offsets": [position, position + end - start]}
        position += end - start
    text = json.dumps({"step": data["step"], part: data[part]})
    new = json.dumps({"__metadata__": {"clew": text}, **kept}).encode()
    new += b" " * (-len(new) % 8)
    return struct.pack("<Q", len(new)) + new + b"".join(pieces)


def _try_out(text: str, blob: bytes, target: Path) -> str:
    """Run the test where it will stand and return what is wrong with it: nothing when it fails as it should."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".clew-repro-", dir=target.parent) as folder:
        trial = Path(folder) / target.name
        # It stands one folder deeper than it will, so the path to the script has to lead one further up.
        _write(
            trial,
            text.replace("Path(__file__).parent /", "Path(__file__).parents[1] /"),
            trial.with_suffix(".safetensors"),
            blob,
        )
        last = _run_in_copy(trial) if "torch" in sys.modules else _run_apart(trial)
    return "" if last.startswith("AssertionError: ") else last


def _run_in_copy(trial: Path) -> str:
    """Run a test in a copy of this process, which has torch already, and return how it ended."""
    from clew.replay.fork import rest_openmp
    from clew.replay.process import run_in_child

    def act(child: Child) -> None:
        sys.argv = [str(trial)]
        runpy.run_path(str(trial), run_name="__main__")
        child.answer({"error": "it passes"})

    rest_openmp()
    return str(run_in_child(act).get("error", "it ended without a word"))


def _run_apart(trial: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(trial)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return (done.stderr.strip().splitlines()[-1:] or ["it passes"])[0]


def _write(target: Path, text: str, beside: Path, blob: bytes) -> None:
    beside.write_bytes(blob)
    target.write_text(text, encoding="utf-8")
