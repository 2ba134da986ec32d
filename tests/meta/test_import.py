"""Importing clew is free, and each of its modules stands alone."""

import subprocess
import sys
import textwrap
from pathlib import Path

import clew

MOST_MODULES = 40
HEAVY = ("torch", "jax", "keras", "rich", "numpy", "pyarrow", "safetensors")
READING_SIDE = ("clew.model", "clew.store", "clew.query", "clew.views", "clew.render")

COUNT = """
    import sys
    before = set(sys.modules)
    {statement}
    print(len(set(sys.modules) - before))
    print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({heavy!r})))
"""


def run(code: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def weigh(statement: str) -> tuple[int, list[str]]:
    """Return how many modules a statement loads, and which heavy packages are there after it."""
    done = run(COUNT.format(statement=statement, heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    count, _, heavy = done.stdout.partition("\n")
    return int(count), heavy.split()


def test_importing_clew_loads_next_to_nothing():
    count, heavy = weigh("import clew")
    assert heavy == []
    assert count < MOST_MODULES


def test_the_command_line_itself_loads_nothing_heavy():
    _, heavy = weigh(
        "import clew.cli; sys.stdout = sys.stderr; clew.cli.main([]); sys.stdout = sys.__stdout__"
    )
    assert heavy == []


def test_the_weighing_would_see_a_heavy_import():
    count, heavy = weigh("import rich.console, numpy")
    assert heavy == ["numpy", "rich"]
    assert count > MOST_MODULES


def list_modules() -> list[str]:
    """Return the modules of clew from its files: importing them to ask would spoil what is tested."""
    root = Path(clew.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")


ALONE = """
    import importlib, sys
    for name in {names!r}:
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "clew"]:
            if loaded != "clew.stats._kernel":
                del sys.modules[loaded]
        importlib.import_module(name)
        if "torch" in sys.modules and name.startswith({reading!r}):
            sys.exit(name + " loads torch")
"""


def test_each_module_imports_alone_without_a_warning():
    names = list_modules()
    assert len(names) > 15
    # The reading side comes first: what it loads itself is seen before an adapter loads torch.
    names.sort(key=lambda name: not name.startswith(READING_SIDE))
    done = run(ALONE.format(names=names, reading=READING_SIDE), "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
