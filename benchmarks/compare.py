"""How often the verdict of a comparison is right, on pairs of trainings that differ in one known way.

`python -m benchmarks.compare` trains each pair, compares the two recordings and prints the score. A verdict is right
when it names the step, the place and the class of the cause; a pair without a difference must be called identical.
The limit: 90 of 100, and every identical pair.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import clew
from benchmarks.compare_pairs import SCRIPTS, Pair, edit, read_pairs

if TYPE_CHECKING:
    from clew.compare.diff import Diff
    from clew.query import Run

LIMIT = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--pairs", default="pairs", help="the list of pairs: pairs or more")
    parser.add_argument("--only", default="", help="pairs whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="print every verdict, not only the wrong ones")
    args = parser.parse_args()
    chosen = [pair for pair in read_pairs(args.pairs) if args.only in pair.name]
    with tempfile.TemporaryDirectory(prefix="clew-bench-") as folder:
        bench = Bench(Path(folder))
        wrong = {pair.name: found for pair in chosen if (found := bench.judge(pair, verbose=args.verbose))}
    different = [pair for pair in chosen if pair.cause]
    right = sum(pair.name not in wrong for pair in different)
    same = sum(pair.name not in wrong for pair in chosen if not pair.cause)
    count_same = len(chosen) - len(different)
    print(f"right: {right} of {len(different)} differences, {same} of {count_same} identical pairs")
    return 0 if right >= LIMIT * len(different) and same == count_same else 1


class Bench:
    """Trains and compares; the unchanged scripts are trained once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plain: dict[str, Run] = {}
        self._count = 0

    def judge(self, pair: Pair, *, verbose: bool = False) -> str:
        """Return what is wrong with the verdict on a pair, nothing when it is right."""
        found = self.compare(pair)
        problem = find_problem(pair, found)
        if problem or verbose:
            print(
                f"{'WRONG' if problem else 'right'}  {pair.script}: {pair.name}: {problem}\n       {found.sentence}"
            )
        return problem

    def compare(self, pair: Pair) -> Diff:
        """Train both sides of a pair, the first only once for all pairs, and compare them."""
        text = (SCRIPTS / f"{pair.script}.py").read_text(encoding="utf-8")
        if pair.script not in self._plain:
            self._plain[pair.script] = self._train(text, pair.script)
        return clew.diff(self._plain[pair.script], self._train(edit(text, pair), pair.script))

    def _train(self, text: str, name: str) -> Run:
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        script = place / f"{name}.py"
        script.write_text(text, encoding="utf-8")
        parts = runpy.run_path(str(script))
        settings = {"budget": "off", "status": False, "doctor": False, "histograms": False}
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            watch = stack.enter_context(clew.watch(out=str(place), name="run", **settings))
            parts["main"]()
        return clew.open_run(watch.path)


def find_problem(pair: Pair, found: Diff) -> str:
    """Return how a verdict differs from what was expected, or nothing."""
    if not pair.cause:
        return "" if found.is_identical else "not called identical"
    if found.first is None:
        return f"no difference found, expected {pair.cause}"
    first = found.first
    problems = []
    if first.step not in pair.steps:
        problems.append(f"step {first.step}, expected {sorted(pair.steps)}")
    if not pair.sites & {"*", first.site, first.site_b}:
        problems.append(f"site {first.site}, expected {sorted(pair.sites)}")
    if first.cause != pair.cause:
        problems.append(f"cause {first.cause}, expected {pair.cause}")
    return "; ".join(problems)


if __name__ == "__main__":
    raise SystemExit(main())
