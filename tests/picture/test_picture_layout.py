"""Where boxes and wires go: nothing overlaps, everything flows down, wires end where boxes begin."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_graph import Maker, chain, nested, residual, transformer

from clew.views.graph_card import Cards
from clew.views.graph_color import choose_coloring
from clew.views.graph_layers import arrange
from clew.views.graph_layout import Layout
from clew.views.graph_tree import build_tree, opened_keys
from clew.views.graph_wiring import wire


def lay_out(graph, depth=99, *, verbose=False):
    root = build_tree(graph)
    layout = Layout(graph, root, Cards(graph, choose_coloring(graph, "op"), verbose=verbose))
    return layout.open(root, opened_keys(root, depth))


def rectangles(group):
    for placed in group.boxes:
        if placed.inside is None:
            extent = placed.card.extent
            left, right, height = extent.left, extent.right, extent.height
        else:
            inside = placed.inside
            left, right, height = inside.axis, inside.width - inside.axis, inside.height
        yield placed.x - left, placed.y, placed.x + right, placed.y + height


def groups(group):
    yield group
    for placed in group.boxes:
        if placed.inside is not None:
            yield from groups(placed.inside)


def check(graph, depth=99):
    top = lay_out(graph, depth)
    for group in groups(top):
        shapes = list(rectangles(group))
        for (a0, b0, a1, b1), (c0, d0, c1, d1) in itertools.combinations(shapes, 2):
            assert a1 <= c0 + 1e-6 or c1 <= a0 + 1e-6 or b1 <= d0 + 1e-6 or d1 <= b0 + 1e-6, "boxes overlap"
        for left, up, right, down in shapes:
            assert left >= -1e-6, "a box hangs out of its frame"
            assert right <= group.width + 1e-6, "a box hangs out of its frame"
            assert up >= -1e-6, "a box hangs out of its frame"
            assert down <= group.height + 1e-6, "a box hangs out of its frame"
        for points, _, tensors in group.wires:
            assert tensors
            heights = [y for _, y in points]
            assert heights == sorted(heights), "a wire runs up"
    return top


@pytest.mark.parametrize("depth", [1, 2, 99])
@pytest.mark.parametrize("graph", [residual(2), transformer(2), nested(200), chain(90)])
def test_nothing_overlaps_and_every_wire_runs_down(graph, depth):
    check(graph, depth)


@st.composite
def random_graphs(draw):
    """Any graph a forward pass can leave: each operation uses what came before it, in modules that nest."""
    m = Maker()
    made = [m.input("x", (2, 3)), m.input("mask", (2,), "bool")]
    sites = draw(st.lists(st.sampled_from(["", "a", "a.b", "a.c", "d", "d.e.f"]), min_size=1, max_size=24))
    for site in sites:
        chosen = draw(st.lists(st.integers(0, len(made) - 1), min_size=0, max_size=3, unique=True))
        params = [("w", (3,), "param")] if draw(st.booleans()) else []
        outputs = draw(st.integers(1, 2))
        result = m.op("op", [made[i] for i in chosen], (2, 3), site=site, params=params, outputs=outputs)
        made.extend([result] if outputs == 1 else result)
    return m.finish(made[-1])


@settings(max_examples=60, deadline=None)
@given(random_graphs(), st.integers(1, 4))
def test_any_graph_is_drawn_without_overlaps(graph, depth):
    check(graph, depth)


def reached(group, number, tensor):
    """Say whether a wire of a tensor ends on the top of a box, and whether it carries an arrow there."""
    placed = group.boxes[number]
    return any(
        arrow and tensor in tensors and points[-1] == pytest.approx((placed.x, placed.y))
        for points, arrow, tensors in group.wires
    )


def test_every_use_of_a_tensor_is_a_wire_with_an_arrow():
    graph = chain(12)
    top = lay_out(graph)
    for operation in graph.operations:
        assert reached(top, operation.id + 1, operation.inputs[0])
    assert reached(top, len(top.boxes) - 1, graph.outputs[0])


def test_the_main_path_of_a_chain_is_one_straight_line():
    axes = {placed.x for placed in lay_out(residual(2), 1).boxes}
    assert len(axes) == 1


def test_a_skip_goes_around_what_it_skips():
    top = lay_out(residual(1), 2)
    block = next(placed.inside for placed in top.boxes if placed.inside)
    conv = block.boxes[0]
    around = [points for points, _, _ in block.wires if any(x > conv.x + 20 for x, _ in points)]
    assert around, "the skip runs through the boxes"


def test_branches_stand_on_both_sides_of_what_joins_them():
    m = Maker()
    x = m.input("x", (2,))
    left, right = m.op("sin", [x], (2,)), m.op("cos", [x], (2,))
    top = lay_out(m.finish(m.op("add", [left, right], (2,))))
    x, sin, cos, add, _ = (placed.x for placed in top.boxes)
    assert sin < add < cos
    assert add == pytest.approx((sin + cos) / 2)
    assert x == pytest.approx(add)


def test_equal_blocks_are_worked_out_once():
    graph = transformer(12)
    root = build_tree(graph)
    wirings = wire(graph, root)
    keys = {wirings[box.key].key for box in root.walk() if box.title.startswith("h.")}
    assert len(keys) == 1


def test_crossings_that_can_be_avoided_are():
    m = Maker()
    x = m.input("x", (2,))
    a, b = m.op("a", [x], (2,)), m.op("b", [x], (2,))
    d, c = m.op("d", [b], (2,)), m.op("c", [a], (2,))
    graph = m.finish(c, d)
    root = build_tree(graph)
    rows = arrange(wire(graph, root)[""]).rows
    by_title = {box.title: i for i, box in enumerate(root.children)}
    upper = [row.index(by_title[name]) for row in rows for name in "ab" if by_title[name] in row]
    lower = [row.index(by_title[name]) for row in rows for name in "cd" if by_title[name] in row]
    assert upper == lower


def test_an_input_stands_just_above_its_first_user():
    m = Maker()
    x, late = m.input("x", (2,)), m.input("late", (2,))
    for _ in range(6):
        x = m.op("relu", [x], (2,))
    top = lay_out(m.finish(m.op("add", [x, late], (2,))))
    assert top.boxes[1].y > top.boxes[5].y
