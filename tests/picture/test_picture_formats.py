"""A graph in each format: complete, well formed, and safe whatever the names contain."""

import itertools
import json
import re
import struct
import time
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import pytest
from synthetic_graph import Maker, nested, residual, transformer

from clew.api import picture
from clew.errors import UsageError
from clew.model.graph import Graph
from clew.render.png import render_png
from clew.views.scene import Scene

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '</script><b onload="x">&\'`|#"\\'


def nasty_graph():
    m = Maker(NASTY)
    x = m.input(NASTY, (2,))
    m.module("a", NASTY)
    x = m.op("sin", [x], (2,), site="a", args={NASTY: NASTY}, source=NASTY)
    x = m.op("relu", [x], (2,), site="a", params=[(NASTY, (2,), "param")])
    return m.finish(x)


def draw_svg(graph, **options):
    return ET.fromstring(picture.render(graph, "svg", **options).decode())


def words(svg):
    return ["".join(element.itertext()) for element in svg.iter(f"{SVG}text")]


def decode_png(data):
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    at, body = 8, b""
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        chunk = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + chunk)
        body += chunk if name == b"IDAT" else b""
        at += 12 + size
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


def test_svg_shows_boxes_shapes_parameters_title_and_legend():
    svg = draw_svg(residual(2))
    shown = words(svg)
    for text in (
        "ResNet",
        "conv1",
        "conv2d",
        "weight 16×3×3×3",
        "4×16×32×32",
        "block-0",
        "Block",
        "fc",
        "output",
    ):
        assert text in shown
    assert "convolution" in shown
    assert "parameter" in shown
    assert any(text.startswith("27 operations · ") for text in shown)
    assert svg.find(f"{SVG}title").text == "Graph of ResNet"


def test_depth_decides_what_is_open():
    assert "Block" in words(draw_svg(residual(1), depth=1))
    assert "bn2" not in words(draw_svg(residual(1), depth=1))
    assert "bn2" in words(draw_svg(residual(1), depth=2))


def test_verbose_shows_arguments_and_what_needs_a_gradient():
    plain, verbose = words(draw_svg(residual(1))), words(draw_svg(residual(1), verbose=True))
    assert "stride=(1, 1)" not in plain
    assert "stride=(1, 1)" in verbose
    assert "needs a gradient" in verbose
    strokes = [
        element.get("stroke-width") for element in draw_svg(residual(1), verbose=True).iter(f"{SVG}rect")
    ]
    assert "2.2" in strokes


@pytest.mark.parametrize("graph", [residual(1), nasty_graph()])
def test_svg_is_well_formed_and_fetches_nothing(graph):
    text = picture.render(graph, "svg").decode()
    ET.fromstring(text)
    assert "<script" not in text
    assert re.findall(r"(?:href|src|url)\s*[=(]", text) == []


def test_png_is_a_picture_with_ink_in_the_colours_of_the_theme():
    pixels = decode_png(picture.render(residual(1), "png", depth=2))
    assert pixels.shape[0] > 800
    colours = set(np.unique(pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)).tolist())
    assert {0xFFFFFF, 0xD3E4FB, 0xFDE0EE} <= colours  # paper, a convolution, a parameter
    assert (pixels.min(axis=2) < 60).any(), "no dark text"


def test_png_and_svg_have_the_same_proportions():
    svg = draw_svg(transformer(1))
    pixels = decode_png(picture.render(transformer(1), "png"))
    assert pixels.shape[1] / pixels.shape[0] == pytest.approx(
        float(svg.get("width")) / float(svg.get("height")), rel=0.01
    )


def test_a_picture_too_large_for_pixels_says_what_to_do():
    with pytest.raises(UsageError, match="too large for pixels") as caught:
        render_png(Scene(100_000, 4_000, (), "a long one"))
    assert "depth=2" in caught.value.next_step


def test_dot_is_balanced_and_has_a_cluster_for_each_open_module():
    text = picture.render(residual(2), "dot", depth=2).decode()
    assert text.startswith('digraph "ResNet" {')
    assert text.count("{") == text.count("}")
    assert text.count("subgraph cluster_") == 2
    names = set(re.findall(r"^\s*(n\d+) \[label", text, re.MULTILINE))
    ends = {end for pair in re.findall(r"(n\d+) -> (n\d+)", text) for end in pair}
    assert ends <= names
    assert '[label="4×16×32×32"]' in text


def test_mermaid_has_subgraphs_edges_and_classes():
    text = picture.render(residual(2), "mermaid", depth=2).decode()
    assert text.startswith("flowchart TB\n")
    assert text.count("subgraph ") == text.count("\n  end\n") == 2
    assert re.search(r'n\d+ -->\|"4×16×32×32"\| n\d+', text)
    assert re.search(r"classDef s\d+ fill:#d3e4fb", text)


@pytest.mark.parametrize("language", ["dot", "mermaid"])
def test_names_cannot_break_out_of_their_quotes(language):
    text = picture.render(nasty_graph(), language, verbose=True).decode()
    quote = r'"(?:[^"\\]|\\.)*"' if language == "dot" else r'"[^"]*"'
    rest = re.sub(quote, "", text)
    assert "script" not in rest
    assert '"' not in rest


def test_edges_of_every_language_join_the_same_boxes():
    graph = transformer(2)
    dot = re.findall(r"(n\d+) -> (n\d+)", picture.render(graph, "dot", depth=3).decode())
    mermaid = re.findall(r"(n\d+) -->\|[^|]*\| (n\d+)", picture.render(graph, "mermaid", depth=3).decode())
    assert dot == mermaid
    uses = sum(
        graph.tensors[i].producer >= 0 or graph.tensors[i].role == "input"
        for op in graph.operations
        for i in op.inputs
    )
    assert len(dot) == uses + 1


def test_json_is_the_graph_itself():
    graph = residual(1)
    assert Graph.from_json(picture.render(graph, "json").decode()) == graph


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_html_is_one_file_that_reaches_for_nothing():
    page = picture.render(transformer(2), "html").decode()
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", page))
    assert addresses == set()
    assert re.findall(r"<(?:link|img|iframe|script)[^>]*(?:src|href)=", page) == []
    assert "default-src 'none'" in page


def test_html_holds_every_operation_tensor_and_box():
    graph = transformer(3)
    data = embedded(picture.render(graph, "html").decode())
    assert len(data["ops"]) == len(graph.operations)
    assert len(data["tensors"]) == len(graph.tensors)
    assert {box["op"] for box in data["boxes"] if "op" in box} == set(range(len(graph.operations)))
    assert all(
        data["boxes"][child]["parent"] == i
        for i, box in enumerate(data["boxes"])
        for child in box.get("children", ())
    )


def test_html_stores_equal_blocks_once():
    one, twelve = (embedded(picture.render(transformer(n), "html").decode()) for n in (1, 12))
    assert len(twelve["plans"]) == len(one["plans"])
    assert len(twelve["cards"]) <= len(one["cards"]) + 12


def test_names_cannot_end_the_script_of_the_page():
    page = picture.render(nasty_graph(), "html").decode()
    assert "</script><b" not in page
    assert page.count("</script>") == 2
    assert embedded(page)["title"] == NASTY


def test_save_chooses_by_the_ending_and_returns_the_path(tmp_path):
    graph = residual(1)
    starts = {
        "a.svg": b"<svg", "a.png": b"\x89PNG", "a.html": b"<!doctype", "a.dot": b"digraph", "a.gv": b"digraph",
        "a.mermaid": b"flowchart", "a.mmd": b"flowchart", "a.json": b"{",
    }  # fmt: skip
    for name, start in starts.items():
        path = picture.save(graph, tmp_path / name)
        assert path == tmp_path / name
        assert path.read_bytes().startswith(start)
    assert picture.save(graph, tmp_path / "plain", format="svg").read_bytes().startswith(b"<svg")


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("a.svgg", {}, "no format 'svgg' for a picture\n  where: a.svgg\n  next:  did you mean 'svg'?"),
        ("a", {}, "a picture needs a format\n  where: a\n  next:  end the name with one of: svg, png, html"),
        ("a.svg", {"depth": 0}, "depth is 0\n  next:  1 shows the parts of the model"),
        ("a.svg", {"color": "helth"}, "no statistic 'helth' to colour by"),
        ("a.svg", {"color": "std"}, "cannot colour by 'std': the tensors of this graph carry no statistics"),
        (
            "no/where/a.svg",
            {},
            "cannot write the picture: No such file or directory\n  where: no/where/a.svg",
        ),
    ],
)
def test_what_cannot_be_drawn_says_why(name, options, text):
    with pytest.raises(UsageError) as caught:
        picture.save(residual(1), name, **options)
    assert text in str(caught.value)


def test_pictures_do_not_depend_on_the_clock_or_on_hash_order():
    first, second = (picture.render(transformer(2), "svg", depth=3) for _ in range(2))
    assert first == second
    assert str(time.localtime().tm_year).encode() not in first


def test_every_box_has_its_own_key_in_a_deep_fold():
    data = embedded(picture.render(nested(3000, per_block=10, per_stage=100), "html").decode())
    parents = [box["parent"] for box in data["boxes"]]
    assert all(parent < index for index, parent in enumerate(parents))
    assert all(len(box.get("children", ())) <= 62 for box in data["boxes"])
    pairs = itertools.pairwise(sorted(child for box in data["boxes"] for child in box.get("children", ())))
    assert all(b == a + 1 for a, b in pairs)
