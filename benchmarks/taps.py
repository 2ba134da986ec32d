"""What taps cost: switched off, and on, beside an empty loop and a small step; ``python -m benchmarks.taps``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_CALLS = 2_000
_ROUNDS = 100
_LIMIT_NS = 100.0
"""What a call may cost with ``CLEW_CHECKS=0``."""


def time_calls(call: Callable[[Any], Any], x: Any, calls: int) -> float:
    """Return nanoseconds of one call: the best of many short rounds, each beside one of the empty loop."""
    empty, full = [], []
    repeat = range(calls)
    for _ in range(_ROUNDS):
        start = time.perf_counter_ns()
        for _i in repeat:
            pass
        middle = time.perf_counter_ns()
        for _i in repeat:
            call(x)
        empty.append(middle - start)
        full.append(time.perf_counter_ns() - middle)
    return (min(full) - min(empty)) / calls


def time_taps(calls: int) -> dict[str, float]:
    """Return nanoseconds for each tap in this process, as its environment switched them."""
    import torch

    import clew

    torch.set_num_threads(1)
    x = torch.rand(64, 64)
    # Called through the package, as in the user's code: the attributes are part of the price.
    taps: dict[str, Callable[[Any], Any]] = {
        "a lambda alone": lambda x: x,
        "clew.check.finite": lambda x: clew.check.finite(x, "x"),
        "clew.check.in_range": lambda x: clew.check.in_range(x, 0.0, 1.0, "x"),
        "clew.check.shape": lambda x: clew.check.shape(x, "64 64"),
        "clew.check.shape, names": lambda x: clew.check.shape(x, "B D"),
        "clew.print, not due": lambda x: clew.print(x, "x", first_n=0),
        "clew.tap": lambda x: clew.tap(x, _ignore),
    }
    return {name: time_calls(tap, x, calls) for name, tap in taps.items()}


def _ignore(x: Any) -> None:
    """Stand for a function of the user."""


def time_plain(calls: int) -> float:
    """Return nanoseconds of what a user would write without clew: ``torch.isfinite(x).all().item()``."""
    import torch

    torch.set_num_threads(1)
    return time_calls(lambda x: bool(torch.isfinite(x).all()), torch.rand(64, 64), calls)


def measure(switch: str) -> dict[str, float]:
    """Return the costs in a fresh process with ``CLEW_CHECKS`` set."""
    environment = {**os.environ, "CLEW_CHECKS": switch}
    command = [sys.executable, "-m", "benchmarks.taps", "--child"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    costs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return costs


def main() -> int:
    """Print the table; the exit code is 1 when a switched-off tap costs too much."""
    if "--child" in sys.argv:
        off = os.environ["CLEW_CHECKS"] == "0"
        print(json.dumps(time_taps(_CALLS if off else _CALLS // 20)))
        return 0
    off, on = measure("0"), measure("1")
    base = off.pop("a lambda alone")
    on.pop("a lambda alone")
    print(
        f"64 x 64 floats, nanoseconds a call (a call of a lambda that does nothing, {base:.0f}, taken off)\n"
    )
    print(f"{'':26}{'off':>8}{'on':>10}   limit when off: {_LIMIT_NS:.0f}")
    for name in off:
        print(f"{name:26}{off[name] - base:8.0f}{on[name] - base:10.0f}")
    print(f"\ntorch.isfinite(x).all() by hand: {time_plain(_CALLS // 20):,.0f}")
    return 0 if all(cost - base < _LIMIT_NS for cost in off.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
