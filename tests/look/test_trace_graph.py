"""A graph can be visited, searched and kept as text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clew
from clew.errors import UsageError
from clew.model.graph import Graph


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()))
    return clew.trace(model, torch.randn(3, 4), summary=True, backward=True)


def test_visit_in_forward_order(graph):
    seen = []
    assert graph.visit(lambda operation: seen.append(operation.name)) is None
    assert seen == ["0", "1", "2.0", "2.1"]


def test_visit_check_stops_early(graph):
    seen = []
    assert graph.visit_check(lambda operation: seen.append(operation.name) or operation.op == "relu") is True
    assert seen == ["0", "1"]


def test_find(graph):
    assert [each.name for each in graph.find("2.*")] == ["2.0", "2.1"]
    assert [each.name for each in graph.find(op="{relu,sigmoid}")] == ["1", "2.1"]
    assert [each.name for each in graph.find(site="2.?", role="param")] == ["2.0"]
    assert graph.find("nothing.*") == []
    assert graph.find(line="no_such_file.py") == []
    with pytest.raises(UsageError, match="find takes text, not 41"):
        graph.find(line=41)


def test_brackets(graph):
    assert graph["2.0"].op == "linear"
    assert graph[0].name == "0"
    assert repr(graph["2.0"]) == "2.0 linear: (3,4) 2.0.weight(2,4) 2.0.bias(2) -> (3,2)"
    assert graph["2.0"].source == "", "no line of the user's called it"


def test_names_that_do_not_exist_get_suggestions(graph):
    with pytest.raises(UsageError, match=r"no operation or module '2\.5'") as caught:
        graph["2.5"]
    assert "did you mean" in caught.value.next_step
    with pytest.raises(UsageError, match=r"no tensor '0\.weigth'") as caught:
        graph.tensor("0.weigth")
    assert caught.value.next_step == "did you mean '0.weight'?"


def test_several_operations_are_not_one():
    class Two(nn.Module):
        def forward(self, x):
            return x.exp().log()

    graph = clew.trace(nn.Sequential(Two()), torch.rand(3))
    with pytest.raises(UsageError, match=r"'0' ran 2 operations: 0\.exp, 0\.log"):
        graph["0"]


def test_json_keeps_everything(graph):
    again = type(graph).from_json(graph.to_json())
    assert again == graph
    assert Graph.from_json(graph.to_json(indent=1)).operations == graph.operations


def test_json_keeps_nan_and_infinite_numbers():
    graph = clew.trace(
        lambda x: x.masked_fill(x > 0, float("-inf")), torch.tensor([float("nan")]), summary=True
    )
    again = Graph.from_json(graph.to_json())
    assert again.operations[-1].args["value"] == float("-inf")
    assert str(again.tensors) == str(graph.tensors)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "name": "x", "operations": [{}]}']
)
def test_text_that_is_no_graph_is_refused(text):
    with pytest.raises(UsageError, match="this text is not a graph"):
        Graph.from_json(text)


def test_a_graph_of_another_version_is_refused(graph):
    with pytest.raises(UsageError, match="another version"):
        Graph.from_json(graph.to_json().replace('"format": 1', '"format": 99'))


def test_counts_add_up(graph):
    assert len(graph) == 4
    assert graph.parameters == sum(module.parameters for module in graph.modules) == 4 * 4 + 4 + 4 * 2 + 2
    assert graph.trainable == graph.parameters
    assert graph.macs == 3 * 4 * 4 + 3 * 4 * 2
    assert graph.bytes == sum(operation.bytes for operation in graph)
    assert repr(graph) == "<Trace Sequential: 4 operations, 6 modules, 30 parameters>"


def test_measured_values_and_gradients(graph):
    output = graph.tensors[graph.outputs[0]]
    assert 0 < output.stats["min"] <= output.stats["median"] <= output.stats["max"] < 1
    assert output.grad_stats["mean"] == pytest.approx(1.0), "without a loss: the sum of the outputs"
    assert graph.tensor("0.weight").grad_stats["count"] == 16
    assert any("no loss was given" in note for note in graph.notes)
