import io
import math
import re

import pytest

from clew.render.terminal import Screen, fit_columns, lower, shorten
from clew.views.block import Callout, Cell, Column, Curve, Heading, KeyValues, Page, Table, Text
from clew.views.curve import thin

COLUMNS = (
    Column("name", "name", flexible=True),
    Column("state", "state"),
    Column("steps", "steps", "integer"),
    Column("loss", "last loss", "number", drop=1),
    Column("size", "size", "bytes", drop=2),
    Column("started", "started", "time", drop=3),
)


def make_page() -> Page:
    losses = [2.3 * math.exp(-step / 60) + 0.05 for step in range(200)]
    losses += [0.1 * math.exp(step / 8) for step in range(80)] + [math.nan] * 20
    rows = tuple(
        (
            Cell(f"20261115-14250{index}-a-training-with-a-long-name"),
            Cell("died", "bad") if index else Cell("complete", "good"),
            Cell(10**index),
            Cell(0.00123456 * 10**index),
            Cell(12345 * 7**index),
            Cell(f"2026-11-15T14:25:0{index}+00:00"),
        )
        for index in range(4)
    )
    return Page(
        "everything a page can hold",
        (
            Heading("every block", 1),
            Text("A paragraph that is long enough to be wrapped on a terminal of eighty columns or fewer."),
            KeyValues(
                (
                    (
                        "command",
                        Cell("python train.py --lr 0.1 --epochs 3 --data /far/away/from/here"),
                    ),
                    ("cost of clew", Cell(0.031, format="share")),
                    ("peak memory", Cell(1.5e9, "warn", format="bytes")),
                    ("git", Cell(None)),
                )
            ),
            Heading("curve"),
            thin("loss", range(300), losses),
            Heading("table"),
            Table(COLUMNS, rows, title="runs", note="4 of 4"),
            Table(COLUMNS, (), empty="no runs here"),
            Callout("error", "NaN in the gradient of fc1 at step 12", "clew show latest --site fc1"),
            Callout("warning", "the run died"),
            Callout("note", "every third step was recorded"),
        ),
    )


@pytest.mark.parametrize("width", [100, 80, 40, 24])
def test_a_page_fits_its_width(golden, width):
    text = lower(make_page(), Screen(width=width))
    golden(f"page_{width}.txt", text)
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_ascii_is_enough(golden):
    text = lower(make_page(), Screen(width=80, unicode=False))
    golden("page_ascii.txt", text)
    assert text.isascii()
    assert "?" not in text


def test_colours_change_nothing_but_colours(golden):
    colored = lower(make_page(), Screen(width=80, color=True))
    golden("page_color.txt", colored)
    stripped = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()]
    assert stripped == lower(make_page(), Screen(width=80)).splitlines()
    assert colored.count("\x1b[") > 20


def test_a_pipe_gets_whole_lines():
    text = lower(make_page(), Screen(fits=False))
    for row in range(4):
        assert f"20261115-14250{row}-a-training-with-a-long-name" in text
    assert "2026-11-15 14:25:03" in text
    assert "…" not in text


def test_numbers_line_up_on_the_right():
    table = Table((Column("a", "count", "integer"),), tuple((Cell(10**power),) for power in range(5)))
    lines = lower(Page("", (table,)), Screen()).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_escape_sequences_of_names_do_not_reach_the_terminal():
    evil = "\x1b]0;owned\x07\x9b31m\udcff"
    page = Page(
        evil,
        (
            Heading(evil),
            Text(evil),
            KeyValues(((evil, Cell(evil)),)),
            Table((Column("a", evil),), ((Cell(evil),),), title=evil, note=evil),
            Callout("note", evil, evil),
            Curve(evil, (), (), (), ()),
        ),
    )
    text = lower(page, Screen(width=200))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    text.encode("utf-8")


def test_markup_in_names_is_text():
    text = lower(Page("", (Text("[bold]x[/bold] :smile:"),)), Screen())
    assert text == "[bold]x[/bold] :smile:\n"


def test_a_block_that_cannot_be_drawn_says_so_and_the_rest_follows():
    page = Page("", (Table(COLUMNS, ((Cell("too short"),),)), Text("after")))
    text = lower(page, Screen(width=120))
    assert "(Table could not be drawn: ValueError" in text
    assert text.endswith("after\n")


def test_columns_that_matter_least_go_first_and_are_named():
    text = lower(make_page(), Screen(width=50))
    assert "not enough width for: size, started" in text


def test_fitting_shrinks_before_it_drops():
    texts = [["a" * 40, "complete", "1,000", "0.1", "1.00 kB", "2026-11-15 14:25:01"]]
    assert fit_columns(COLUMNS, texts, width=None) == [40, 8, 5, 9, 7, 19]
    assert fit_columns(COLUMNS, texts, width=80) == [22, 8, 5, 9, 7, 19]
    assert fit_columns(COLUMNS, texts, width=40) == [23, 8, 5, 0, 0, 0]
    assert fit_columns(COLUMNS, texts, width=20) == [4, 8, 5, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("short", 10, "short"), ("layers.0.attention.weight", 15, "layers.….weight"), ("abcdefgh", 3, "abc")],
)
def test_long_names_lose_their_middle(text, width, short):
    assert shorten(text, width) == short


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def encoding(self):
        return "utf-8"


@pytest.mark.parametrize(
    ("variables", "stream", "expected"),
    [
        ({}, Terminal(), Screen(80, color=True, unicode=True, fits=True)),
        ({"NO_COLOR": "1"}, Terminal(), Screen(80, color=False, unicode=True, fits=True)),
        ({"TERM": "dumb"}, Terminal(), Screen(80, color=False, unicode=True, fits=True)),
        ({"COLUMNS": "50"}, Terminal(), Screen(50, color=True, unicode=True, fits=True)),
        ({"COLUMNS": "5"}, Terminal(), Screen(20, color=True, unicode=True, fits=True)),
        ({}, io.StringIO(), Screen(80, color=False, unicode=False, fits=False)),
        ({"COLUMNS": "50"}, io.StringIO(), Screen(50, color=False, unicode=False, fits=True)),
        ({"FORCE_COLOR": "1"}, io.StringIO(), Screen(80, color=True, unicode=False, fits=False)),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, Terminal(), Screen(80, color=False, unicode=True, fits=True)),
    ],
)
def test_the_medium_is_asked_what_it_can_do(monkeypatch, variables, stream, expected):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: fallback_size)
    assert Screen.of(stream) == expected


fallback_size = type("Size", (), {"columns": 80})
