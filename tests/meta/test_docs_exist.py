"""Every public name and every command has a page, and the index leads to each."""

import re
from pathlib import Path

import pytest

import clew
from clew.cli import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"
NAMES = sorted(name for name in dir(clew) if not name.startswith("_"))


def read_pages() -> list[str]:
    """Return the text of every page of the reference."""
    return [path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md"))]


def is_titled(form: str) -> bool:
    """Say whether a page has the form in its title, alone or together with its kin."""
    return any(re.search(rf"^# .*\b{form}\b", page) for page in read_pages())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_about_each_command(name):
    assert is_titled(f"clew {name}"), f"write docs/reference/{name}.md, titled '# clew {name}'"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_about_each_public_name(name):
    if name.endswith(("Error", "Warning")):
        assert any(f"{name}`" in page or f".{name}" in page for page in read_pages()), (
            f"say when {name} is raised"
        )
    else:
        assert is_titled(f"clew\\.{name}"), f"write docs/reference/{name}.md, titled '# clew.{name}'"


def test_a_name_without_a_page_is_seen():
    assert not is_titled("clew nothing")


def test_the_index_leads_to_every_page():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.name != "index.md"]
    assert pages
    assert [page for page in pages if f"({page})" not in index] == []


def test_every_link_between_pages_leads_somewhere():
    root = DOCS.parent
    broken = [
        f"{page.relative_to(root)}: {link}"
        for page in [root / "README.md", root / "CHANGELOG.md", *DOCS.rglob("*.md")]
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert broken == []
