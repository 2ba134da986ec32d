"""The boxes of a picture: one for each call of a module, nested as the calls were."""

import pytest
from synthetic_graph import Maker, chain, nested, residual, transformer

from clew.views.graph_tree import VISIBLE, build_tree, choose_depth, opened_keys


def titles(box):
    return [child.title for child in box.children]


def count_shown(root, depth):
    opened = opened_keys(root, depth)
    shown, level = 0, list(root.children)
    while level:
        shown += len(level)
        level = [child for box in level if box.key in opened for child in box.children]
    return shown


def test_every_operation_has_exactly_one_box():
    for graph in (residual(), transformer(), nested(400), chain(300)):
        boxes = [box.operation for box in build_tree(graph).walk() if box.kind == "op"]
        assert sorted(boxes) == list(range(len(graph.operations)))


def test_modules_are_boxes_and_a_module_of_one_operation_is_that_operation():
    root = build_tree(residual(2))
    assert titles(root)[:5] == ["x", "conv1", "bn1", "relu", "block-0"]
    conv = root.children[1]
    assert (conv.kind, conv.subtitle, conv.path) == ("op", "conv2d", "conv1")
    block = root.children[4]
    assert (block.kind, block.subtitle, len(block.children)) == ("module", "Block", 10)
    assert [box.title for box in block.children[-2:]] == ["add", "relu"]
    assert titles(root)[-1] == "output"


def test_a_list_of_modules_lends_its_name_and_is_no_box():
    root = build_tree(transformer(3))
    assert [title for title in titles(root) if title.startswith("h")] == ["h.0", "h.1", "h.2"]


def test_a_module_that_wraps_one_other_is_drawn_as_that_one():
    m = Maker()
    x = m.input("x", (2,))
    m.module("module", "Wrapper")
    m.module("module.net", "Net")
    x = m.op("relu", [m.op("sin", [x], (2,), site="module.net")], (2,), site="module.net")
    assert titles(build_tree(m.finish(x))) == ["x", "module.net", "output"]


def test_each_call_of_a_shared_module_is_a_box_of_its_own():
    m = Maker()
    x = m.input("x", (2,))
    for call in range(3):
        m.module("cell", "Cell")
        x = m.op("sin", [x], (2,), site="cell", call=call)
        x = m.op("relu", [x], (2,), site="cell", call=call)
    root = build_tree(m.finish(x))
    assert [(box.title, box.subtitle) for box in root.children if box.kind == "module"] == [
        ("cell", "Cell (call 1)"),
        ("cell", "Cell (call 2)"),
        ("cell", "Cell (call 3)"),
    ]
    assert len({box.key for box in root.walk()}) == len(list(root.walk()))


def test_calls_of_an_outer_module_are_told_apart_by_its_inner_ones():
    m = Maker()
    x = m.input("x", (2,))
    for call in range(2):
        m.module("outer", "Outer")
        for name in ("a", "b"):
            m.module(f"outer.{name}", "Inner")
            x = m.op("sin", [x], (2,), site=f"outer.{name}", call=call)
    calls = [box for box in build_tree(m.finish(x)).children if box.kind == "module"]
    assert [titles(box) for box in calls] == [["a", "b"], ["a", "b"]]


@pytest.mark.parametrize("graph", [nested(2000), chain(2000), chain(20_000), transformer(100)])
def test_a_large_model_starts_with_few_boxes(graph):
    root = build_tree(graph)
    depth = choose_depth(root)
    assert count_shown(root, depth) <= VISIBLE + 2  # the input and the output may come on top
    assert max(len(box.children) for box in root.walk()) <= 62


def test_as_many_levels_open_as_stay_readable():
    root = build_tree(residual(2))
    depth = choose_depth(root)
    assert count_shown(root, depth) <= VISIBLE
    assert depth == 2
    assert choose_depth(root, most=5) == 1


def test_sixty_boxes_are_no_crowd():
    assert len(build_tree(chain(57)).children) == 59


def test_a_fold_says_what_is_in_it():
    part = build_tree(transformer(100)).children[4]
    assert (part.kind, part.title, part.subtitle) == ("part", "h", "100 × Block")


def test_a_graph_without_operations_has_a_picture_of_its_ends():
    m = Maker()
    x = m.input("x", (2,))
    assert titles(build_tree(m.finish(x))) == ["x", "output"]
