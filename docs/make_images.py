"""Draws the pictures of the documentation from real output: ``make images``."""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import clew
from clew.render.terminal import Screen, lower
from clew.views.run_page import make_page

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 84


def draw(text: str, *, title: str, path: Path) -> None:
    """Write terminal output as an SVG that needs nothing from the network."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title, unique_id=path.stem)
    svg = re.sub(r"<!--.*?-->|@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")


def main() -> None:
    """Record the demo and draw its page."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "clew", "run", "--every", "1", "--name", "demo", "--out", folder]
        subprocess.run([*command, "examples/demo_broken.py"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        page = make_page(clew.open_run("demo", root=folder))
    draw(lower(page, Screen(width=WIDTH, color=True)), title="clew show", path=IMAGES / "show.svg")


if __name__ == "__main__":
    main()
