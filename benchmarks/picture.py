"""What a picture costs: ``python -m benchmarks.picture``. The promise: 2,000 operations in under 3 s, starting closed.

The plain work beside it is one round trip of the same graph through JSON, so that a slow machine is seen as such.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

from clew.api import picture
from clew.model.graph import Graph, ModuleNode, Operation, TensorNode

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS: Final = ("svg", "png", "html", "dot", "mermaid")
LIMIT_SECONDS: Final = 3.0
PER_BLOCK: Final = 20
PER_STAGE: Final = 10
_SHAPE: Final = (8, 64)


def make_graph(operations: int) -> Graph:
    """Return stages of blocks of operations with a skip around every block."""
    ops: list[Operation] = []
    tensors = [TensorNode(0, "x", "input", _SHAPE, "float32")]
    modules = [ModuleNode("", "Deep", calls=1)]
    last = entry = 0
    for number in range(operations):
        block, position = divmod(number, PER_BLOCK)
        site = f"stages.{block // PER_STAGE}.blocks.{block % PER_STAGE}"
        if position == 0:
            entry = last
            if block % PER_STAGE == 0:
                modules.append(ModuleNode(f"stages.{block // PER_STAGE}", "Stage", calls=1))
            modules.append(ModuleNode(site, "Block", calls=1))
        inputs = [last]
        if position % 3 == 0:
            tensors.append(TensorNode(len(tensors), f"{site}.w{position}", "param", (64, 64), "float32"))
            inputs.append(tensors[-1].id)
        if position == PER_BLOCK - 1:
            inputs.append(entry)
        op = "linear" if position % 3 == 0 else "add" if position == PER_BLOCK - 1 else "relu"
        last = len(tensors)
        tensors.append(
            TensorNode(last, f"{site}.{op}_{position}", "value", _SHAPE, "float32", producer=number)
        )
        ops.append(Operation(number, f"{site}.{op}_{position}", op, tuple(inputs), (last,), site=site))
    return Graph("Deep", tuple(ops), tuple(tensors), tuple(modules), (0,), (last,))


def time_once(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(operations: int, *, rounds: int = 3) -> dict[str, tuple[float, float]]:
    """Return seconds and ratio to plain JSON of the same graph by format, each the median of interleaved rounds."""
    graph = make_graph(operations)
    results = {}
    for name in FORMATS:
        pairs = [
            (
                time_once(lambda: Graph.from_json(graph.to_json())),
                time_once(lambda n=name: picture.render(graph, n)),
            )
            for _ in range(rounds)
        ]
        seconds = statistics.median(drawn for _, drawn in pairs)
        results[name] = seconds, statistics.median(drawn / plain for plain, drawn in pairs)
    return results


def main() -> int:
    """Print the table and return 1 when the promise is broken."""
    broken = False
    for operations in (200, 2_000, 20_000):
        for name, (seconds, ratio) in measure(operations).items():
            is_slow = operations == 2_000 and seconds > LIMIT_SECONDS
            broken |= is_slow
            verdict = f"  over {LIMIT_SECONDS} s" if is_slow else ""
            print(f"{operations:>7,} operations  {name:<8} {seconds:7.3f} s  {ratio:6.2f}x JSON{verdict}")
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
