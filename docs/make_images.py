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
from clew.views import diagnosis_page, run_page, why_page

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


def record(script: str, *, folder: str) -> clew.Run:
    """Record an example as a user would, and open the run."""
    name = Path(script).stem
    command = [sys.executable, "-m", "clew", "run", "--every", "1", "--name", name, "--out", folder]
    subprocess.run([*command, script], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return clew.open_run(name, root=folder)


def main() -> None:
    """Record the examples and draw their pages."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        broken = record("examples/demo_broken.py", folder=folder)
        nan = record("examples/demo_nan.py", folder=folder)
        pages = {
            "show": run_page.make_page(broken),
            "why": why_page.make_page(nan.verdicts()[0]),
            "doctor": diagnosis_page.make_page(clew.diagnose(nan), name=nan.name),
        }
    for word, page in pages.items():
        text = lower(page, Screen(width=WIDTH, color=True))
        draw(text, title=f"clew {word}", path=IMAGES / f"{word}.svg")


if __name__ == "__main__":
    main()
