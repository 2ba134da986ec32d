"""Every example of the documentation is run, each page from top to bottom in a folder of its own.

``python`` blocks share one namespace per page. A block that starts with ``# file: NAME`` is written to that file
instead. In ``console`` blocks the lines ``$ clew …`` are executed and must exit with 0, or with N where the line
ends with ``# exit N``; other lines are what a reader sees.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import clew
from clew.cli import main
from clew.doctor import rule
from clew.doctor.catalogue import load_rules

if TYPE_CHECKING:
    from zygote import Zygote

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# file: (\S+)\n")
EXIT = re.compile(r"\s+# exit (\d+)\s*$")
ALONE = ("run", "preflight")
"""Commands that need a process of their own: the script becomes ``__main__``."""


class Block(NamedTuple):
    """One fenced block of a page and the line on which its text starts."""

    language: str
    text: str
    line: int


def read_blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [
        Block(
            match[2],
            re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE),
            page[: match.start(3)].count("\n"),
        )
        for match in FENCE.finditer(page)
    ]


def run_page(text: str, name: str, zygote: Zygote) -> None:
    """Run a page in the working directory; raises for the first example that does not do what it says."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in read_blocks(text):
        if found := FILE.match(block.text):
            Path(found[1]).write_text(block.text[found.end() :], encoding="utf-8")
        elif block.language == "python":
            # Line numbers of an error are then those of the page.
            code = compile("\n" * block.line + block.text, name, "exec")
            exec(code, namespace)
        elif block.language == "console":
            run_console(block.text, name, zygote)


def run_console(text: str, name: str, zygote: Zygote) -> None:
    """Run the ``$ clew`` lines of a console block."""
    for line in text.splitlines():
        if not line.startswith("$ clew"):
            continue
        wanted = int(found[1]) if (found := EXIT.search(line)) else 0
        words = shlex.split(EXIT.sub("", line))[2:]
        assert run_clew(words, zygote) == wanted, f"{name}: {line}"


def run_clew(words: list[str], zygote: Zygote) -> int:
    if words[:1] and words[0] not in ALONE:
        return main(words)
    ending = zygote.clew(Path.cwd(), *words)
    print(ending.stdout, ending.stderr)
    return ending.code


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_examples_of_a_page_work(page, zygote, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "argv", ["example"])
        load_rules()
        known = dict(rule.REGISTRY)
        try:
            run_page(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)), zygote)
        finally:
            # A rule that an example registers must not judge the runs of other tests.
            rule.REGISTRY.clear()
            rule.REGISTRY.update(known)


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```python\nx = 1\n```\ntext\n```python\nassert x == 2\n```\n", AssertionError),
        ("```console\n$ clew shwo\n```\n", AssertionError),
        ("```console\n$ clew --version  # exit 3\n```\n", AssertionError),
        ("- item\n  ```python\n  1 / 0\n  ```\n", ZeroDivisionError),
    ],
)
def test_a_page_that_lies_fails(page, error, zygote, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(error):
            run_page(page, "page.md", zygote)


TRUE_PAGE = """
```python
# file: a.txt
hello
```

```python
from pathlib import Path
assert Path("a.txt").read_text() == "hello\\n"
```

```console
$ clew shwo  # exit 2
clew: unknown command 'shwo'
$ clew --version
$ make nothing
```

```text
1 / 0
```
"""


def test_a_page_that_tells_the_truth_passes(zygote, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        run_page(TRUE_PAGE, "page.md", zygote)
    assert capsys.readouterr().out == f"clew {clew.__version__}\n"
