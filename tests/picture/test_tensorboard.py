"""TensorBoard's files, read back by TensorBoard's own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import clew
from clew.cli import main
from clew.render.tensorboard import EDGES, spread
from clew.stats import reference


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = str(tmp_path_factory.mktemp("tb") / "runs")
    with clew.watch(model, optimizer, out=out, every=1) as recorded:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    return recorded.path


def _read(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    return reader.Reload()


def test_a_run_has_its_numbers_there(run, tmp_path):
    assert main(["export", str(run), "--to", "tensorboard", "-o", str(tmp_path)]) == 0
    events, opened = _read(tmp_path), clew.open_run(run)
    loss = events.Scalars("loss")
    assert [each.step for each in loss] == [0, 1, 2, 3]
    np.testing.assert_allclose([each.value for each in loss], opened.scalar("loss").values, rtol=1e-6)
    times = [each.wall_time for each in loss]
    assert times == sorted(times)
    assert times[0] > 1e9
    norms = [each.value for each in events.Scalars("grad l2/0.weight")]
    np.testing.assert_allclose(norms, opened.series("0.weight", "grad", "l2").values, rtol=1e-6)


def test_histograms_count_every_element(run, tmp_path):
    assert main(["export", str(run), "--to", "tensorboard", "-o", str(tmp_path)]) == 0
    first = _read(tmp_path).Histograms("param/0.weight")[0].histogram_value
    assert sum(first.bucket) == first.num == 32
    assert first.min < 0 < first.max


def test_a_part_of_a_run(run, tmp_path):
    words = ["--site", "0.weight", "--kind", "grad", "--step", "1:3"]
    assert main(["export", str(run), "--to", "tensorboard", "-o", str(tmp_path), *words]) == 0
    events = _read(tmp_path)
    assert {tag.split("/")[1] for tag in events.Tags()["scalars"]} == {"0.weight"}
    assert [each.step for each in events.Scalars("grad l2/0.weight")] == [1, 2]


def test_a_graph_has_scopes_shapes_arguments_and_lines(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()), nn.Flatten())
    clew.trace(model, torch.zeros(1, 3, 9, 9)).save(tmp_path, format="tensorboard")
    graph = _read(tmp_path).Graph()
    nodes = {node.name: node for node in graph.node}
    conv = nodes["0/0"]
    assert conv.op == "conv2d"
    assert list(conv.input)[1:] == ["0/0/weight", "0/0/bias"]
    assert b"stride=(2,2)" in conv.attr["parameters"].s
    assert [dim.size for dim in conv.attr["_output_shapes"].list.shape[0].dim] == [1, 4, 4, 4]
    assert nodes["0/1"].input == ["0/0"]
    assert all(each.partition(":")[0] in nodes for node in graph.node for each in node.input)


def test_whole_numbers_keep_their_type(tmp_path):
    clew.trace(nn.Embedding(9, 2), torch.zeros(3, dtype=torch.long)).save(tmp_path, format="tensorboard")
    graph = _read(tmp_path).Graph()
    (given_ids,) = [node for node in graph.node if node.op == "input"]
    assert given_ids.attr["T"].type == 9


def test_a_folder_is_asked_for(run, capsys):
    assert main(["export", str(run), "--to", "tensorboard"]) == 2
    assert "TensorBoard needs a folder" in capsys.readouterr().err


@given(arrays.arrays(np.float32, st.integers(0, 60), elements=st.floats(-1e6, 1e6, width=32)))
def test_buckets_ascend_and_hold_what_they_say(values):
    limits, buckets = spread(reference.histogram(values), float((values == 0).sum()))
    assert sum(buckets) == len(values)
    assert limits == sorted(limits)
    for limit, below in zip(limits, np.cumsum(buckets), strict=True):
        # The first bin of a sign holds everything that is smaller, so nothing is cut inside of it.
        if abs(limit) >= EDGES[0]:
            assert below == (values <= limit if limit < 0 else values < limit).sum()
