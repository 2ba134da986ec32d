"""Showing a picture: in place in a notebook, in the browser with a screen, else the page's address."""

import html
import sys
import types

import pytest
import torch
from synthetic_graph import residual
from torch import nn

import clew
from clew.api import picture


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_without_a_screen_the_path_is_told(temporary, capsys):
    shown = picture.view(residual(1), color="op", depth=1)
    assert capsys.readouterr().err == f"clew: the picture is in {shown.path}\n"
    assert shown.path.is_relative_to(temporary)
    assert shown.path.read_text().startswith("<!doctype html>")
    assert repr(shown) == f"<GraphPicture of ResNet: 16 operations in {shown.path}>"


def test_with_a_screen_the_browser_opens(temporary, monkeypatch, capsys):
    opened = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    shown = picture.view(residual(1))
    assert opened == [shown.path.as_uri()]
    assert capsys.readouterr().err == ""


def test_in_a_notebook_the_picture_is_the_value_and_no_file_is_made(temporary, monkeypatch):
    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    shown = picture.view(residual(1), depth=2, color="op")
    assert shown.path is None
    assert list(temporary.iterdir()) == []
    frame = shown._repr_html_()
    assert frame.startswith('<iframe srcdoc="')
    page = html.unescape(frame.split('srcdoc="')[1].split('" style=')[0])
    assert page == picture.render(residual(1), "html", depth=2).decode()
    assert shown._repr_svg_() == picture.render(residual(1), "svg", depth=2).decode()


def test_a_traced_model_draws_and_shows_itself(temporary, tmp_path, capsys):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    graph = clew.trace(model, torch.randn(2, 3, 8, 8), summary=True)
    for name in ("net.svg", "net.png", "net.html", "net.dot", "net.mermaid", "net.json"):
        assert graph.save(tmp_path / name).stat().st_size > 500
    assert ">conv2d<" in (tmp_path / "net.svg").read_text()
    assert "std " in graph.save(tmp_path / "std.svg", color="std").read_text()
    graph.view()
    assert "the picture is in" in capsys.readouterr().err


def test_models_of_many_shapes_are_drawn_at_every_depth(tmp_path):
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 6, 2, batch_first=True)
    shared = nn.Linear(4, 4)
    models = {
        "transformer": (
            nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
            (torch.randn(2, 3, 8), torch.randn(2, 4, 8)),
        ),
        "recurrent": (lstm, (torch.randn(2, 5, 4),)),
        "shared": (nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), shared), (torch.randn(2, 4),)),
        "function": (lambda x: (x.sin() + x.cos()).sum(), (torch.randn(3),)),
        "several": (lambda x: {"a": x.chunk(2), "b": (x * 2, x + 1)}, (torch.randn(4),)),
        "meta": (nn.Linear(4, 4, device="meta"), (torch.randn(2, 4, device="meta"),)),
    }
    for name, (model, inputs) in models.items():
        graph = clew.trace(model, *inputs)
        for depth in (None, 1, 9):
            text = graph.save(tmp_path / f"{name}.svg", depth=depth).read_text()
            assert text.endswith("</svg>\n")
        graph.save(tmp_path / f"{name}.html")
