"""Functions fit on two screens and files in one head; the aim is far lower, this is the wall."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES = 80
FILE_LINES = 600
PLACES = ("src", "tests", "benchmarks", "examples", "docs")

FILES = sorted(
    path.relative_to(ROOT)
    for place in PLACES
    for pattern in ("*.py", "*.c", "*.h")
    for path in (ROOT / place).rglob(pattern)
)


def long_functions(source: str) -> list[str]:
    """Return the functions of a source that are too long, with their length."""
    return [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES
    ]


def test_there_is_something_to_measure():
    assert len(FILES) > 20


@pytest.mark.parametrize("place", PLACES)
def test_no_function_and_no_file_is_too_long(place):
    found = []
    for path in FILES:
        if path.parts[0] != place:
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        lines = text.count("\n")
        found += [f"{path}: {lines} lines"] if lines > FILE_LINES else []
        found += [f"{path}: {name}" for name in long_functions(text)] if path.suffix == ".py" else []
    assert not found


def test_the_measure_sees_a_long_function():
    body = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    assert long_functions(f"def fine():\n{body[: -len('    x = 1')]}") == []
    assert long_functions(f"async def endless():\n{body}\n") == [f"endless: {FUNCTION_LINES + 1} lines"]
