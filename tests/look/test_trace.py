"""A trace tells what a model did: operations, names, lines, arguments, costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first loaded
import torch.nn.functional as F
from torch import nn

import clew
from clew.errors import UsageError

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def quiet():
    """Let libraries warn about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + F.relu(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kinds(graph):
    return [operation.op for operation in graph]


def test_tutorial_network_has_57_functions():
    tutorial = load_example("nnabla_tutorial")
    graph = clew.trace(tutorial.make_model(), torch.randn(4, 3, 128, 128))
    assert len(graph) == 57
    counts = {op: kinds(graph).count(op) for op in sorted(set(kinds(graph)))}
    assert counts == {
        "add": 4, "batch_norm": 17, "conv2d": 17, "linear": 1, "max_pool2d": 4, "mean": 1, "relu": 13,
    }  # fmt: skip
    first = graph["first-conv"]
    assert first.args == {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    assert [tensor.shape for tensor in first.inputs] == [(4, 3, 128, 128), (16, 3, 3, 3)]
    assert first.macs == 4 * 16 * 128 * 128 * 3 * 9
    assert graph.tensors[graph.outputs[0]].shape == (4, 100)
    assert graph.visit_check(lambda function: function.type == "dropout") is False


def test_tutorial_runs_as_written(capsys, tmp_path):
    load_example("nnabla_tutorial").main(size=32, folder=tmp_path)
    text = capsys.readouterr().out
    assert text.count("==========") == 57
    assert "57 functions\nuses dropout: False\n" in text
    assert "output data" in text
    assert (tmp_path / "network.svg").stat().st_size > 1000
    assert (tmp_path / "network.html").stat().st_size > 1000
    assert "most macs: block-0.in-block-1.conv" in text
    assert "NaN or Inf: ([], [])" in text
    assert "first of each pass: ['first-conv', " in text


def test_names_sites_lines_and_needs_grad():
    graph = clew.trace(Net(), torch.randn(2, 4))
    assert [operation.name for operation in graph] == [
        "blocks.0.norm", "blocks.0.fc", "blocks.0.relu", "blocks.0.add",
        "blocks.1.norm", "blocks.1.fc", "blocks.1.relu", "blocks.1.add", "head",
    ]  # fmt: skip
    assert {operation.site for operation in graph.find("blocks.0.*")} == {
        "blocks.0",
        "blocks.0.fc",
        "blocks.0.norm",
    }
    added = graph["blocks.0.add"]
    assert added.code == "return x + F.relu(self.fc(self.norm(x)))"
    assert graph["blocks.0.fc"].source == added.source, "the line that called the layer, not torch's own"
    assert graph.find(line=added.source.rpartition("/")[2]) == graph.find("blocks.*")
    assert all(operation.needs_grad for operation in graph)
    assert [operation.depth for operation in graph] == list(range(9))
    assert graph.tensor("blocks.0.fc.weight").role == "param"


def test_frozen_parts_do_not_need_grad():
    model = Net()
    model.requires_grad_(False)
    assert not any(operation.needs_grad for operation in clew.trace(model, torch.randn(2, 4)))
    model.head.requires_grad_(True)
    assert [each.name for each in clew.trace(model, torch.randn(2, 4)) if each.needs_grad] == ["head"]
    assert not any(each.needs_grad for each in clew.trace(model, torch.randn(2, 4), no_grad=True))


def test_functions_methods_operators_indexing_and_in_place():
    def function(x):
        y = torch.zeros(3) + x[0]
        y[1] = 5
        y += 1
        y.mul_(2)
        view = y[:2]
        view.add_(1)
        a, b = torch.stack([y, x[1]]).unbind(0)
        return (1 - a) @ b

    graph = clew.trace(function, torch.randn(2, 3))
    assert kinds(graph) == [
        "getitem", "add", "setitem_", "add_", "mul_", "getitem", "add_", "getitem", "stack", "unbind",
        "rsub", "matmul",
    ]  # fmt: skip
    constant = graph.tensors[graph["add"].operation.inputs[0]]
    assert (constant.role, constant.name) == ("constant", "zeros")
    written_through_view = graph.operations[6]
    assert graph["stack"].operation.inputs[0] in written_through_view.outputs, (
        "a view's base depends on the write"
    )
    assert graph.operations[5].args == {"idx": ":2"}
    assert graph.name.endswith("function")


def test_arguments_are_plain_values():
    def function(x):
        y = (x * np.float64(0.5)).to(torch.float64, memory_format=torch.contiguous_format)
        return torch.where(x[..., 1:, None] > 0, y.sum(), torch.full((), -1.0)).clamp(min=np.int64(0))

    arguments = [operation.args for operation in clew.trace(function, torch.ones(2, 3))]
    assert arguments == [
        {"other": 0.5}, {"dtype": "float64", "memory_format": "contiguous_format"}, {"idx": ("...", "1:", None)},
        {"other": 0}, {}, {}, {"min": 0},
    ]  # fmt: skip


def test_shared_repeated_and_directly_called_modules():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.again = self.first
            self.second.weight = self.first.weight

        def forward(this, x):
            x = this.act(this.first(x))
            x = this.act(this.again(x))
            return this.second.forward(x)

    graph = clew.trace(Odd(), torch.randn(2, 3))
    assert [(each.name, each.site, each.call) for each in graph] == [
        ("first", "first", 0), ("act", "act", 0), ("first#1", "first", 1), ("act#1", "act", 1),
        ("second", "second", 0),
    ]  # fmt: skip
    with pytest.raises(UsageError) as caught:
        graph["again"]
    assert str(caught.value) == (
        "'again' is another name of the module 'first'\n  next:  take all of its calls: find('first*')"
    )
    with pytest.raises(UsageError, match="'again' is another name of the module 'first'"):
        clew.fetch(Odd(), torch.randn(2, 3), "again")
    weight = graph.tensor("second.weight")
    assert weight.name == "first.weight"
    assert set(weight.aliases) == {"again.weight", "second.weight"}
    assert graph.parameters == 9 + 3 + 3
    assert {module.path: module.calls for module in graph.modules} == {
        "": 1,
        "act": 2,
        "first": 2,
        "second": 1,
    }


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list[torch.Tensor]
    label: str = "pair"


def test_inputs_and_outputs_of_any_form():
    class Anything(nn.Module):
        def forward(self, batch, pair, mode="sum", mask=None, **extra):
            total = batch["a"] + pair.left + pair.right[0] + extra["more"][0]
            return {"total": total, "pair": Pair(total * 2, [batch["a"]]), "mode": mode, "none": mask}

    x = torch.ones(2)
    graph = clew.trace(Anything(), {"a": x}, Pair(x + 1, [x + 2]), "sum", more=(x + 3,))
    assert [graph.tensors[number].name for number in graph.inputs] == [
        "batch[a]", "pair[left]", "pair[right][0]", "more[0]",
    ]  # fmt: skip
    assert kinds(graph) == ["add", "add", "add", "mul"]
    assert [graph.tensors[number].name for number in graph.outputs] == ["add_2", "mul", "batch[a]"]


def test_control_flow_follows_the_data_and_says_so():
    class Branch(nn.Module):
        def forward(self, x):
            return x.sigmoid() if x.sum() > 0 else x.tanh()

    positive, negative = (clew.trace(Branch(), torch.full((2,), value)) for value in (1.0, -1.0))
    assert kinds(positive) == ["sum", "gt", "sigmoid"]
    assert kinds(negative) == ["sum", "gt", "tanh"]
    assert any("another input may take another path: bool at" in note for note in positive.notes)


def test_meta_device_takes_inputs_inside_a_dataclass_and_leaves_them():
    @dataclasses.dataclass(frozen=True)
    class Batch:
        pixels: torch.Tensor
        more: dict

    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    batch = Batch(torch.ones(4, 3), {"mask": torch.ones(4, 1)})
    graph = clew.trace(nn.Sequential(Unpack(layer)), batch)
    assert {tensor.device for tensor in graph.tensors} == {"meta"}
    assert batch.pixels.device.type == batch.more["mask"].device.type == "cpu"


class Unpack(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, batch):
        return self.layer(batch.pixels) * batch.more["mask"]


def test_a_class_is_no_model():
    with pytest.raises(UsageError) as caught:
        clew.trace(Unpack, torch.ones(2))
    assert str(caught.value) == (
        "Unpack is a class, not a model\n  next:  make one first, and give Unpack(…) with its inputs"
    )


def test_meta_device_gives_shapes_without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.ReLU())
    graph = clew.trace(model, torch.randn(2, 100_000), summary=True)
    assert graph.tensors[graph.outputs[0]].shape == (2, 100_000)
    assert graph.macs == 2 * 100_000**2
    assert {tensor.device for tensor in graph.tensors} == {"meta"}
    assert all(tensor.stats is None for tensor in graph.tensors)


def test_recurrent_attention_and_embedding_costs():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
            self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, ids):
            h, _ = self.lstm(self.embed(ids))
            h, _ = self.attention(h, h, h)
            q = h.view(2, 5, 3, 4).transpose(1, 2)
            return torch.einsum("bhld,bhsd->bhls", q, q), F.scaled_dot_product_attention(q, q, q)

    graph = clew.trace(Mixed(), torch.randint(0, 50, (2, 5)))
    tokens = 2 * 5
    gates = 4 * 6
    assert graph["embed"].macs == 0
    assert graph["embed"].bytes == 2 * (tokens * 8 * 4) + tokens * 8, (
        "reads the rows it looks up, not the table"
    )
    assert graph["lstm"].macs == tokens * 2 * (gates * (8 + 6) + gates * (12 + 6))
    width = 12
    assert (
        graph["attention.multi_head_attention_forward"].macs == 4 * tokens * width**2 + 2 * tokens * 5 * width
    )
    assert graph["einsum"].macs == 2 * 3 * 5 * 5 * 4
    assert graph["scaled_dot_product_attention"].macs == 2 * 3 * 5 * 5 * (4 + 4)
    assert graph["view"].bytes == 0, "a view moves nothing"


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
        (nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 8, 7)),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 5, 5)),
        (nn.Linear(4, 6), (2, 3, 4)),
        (nn.Bilinear(4, 4, 6), (3, 4)),
    ],
)
def test_macs_agree_with_the_flops_torch_counts(layer, shape):
    from torch.utils.flop_counter import FlopCounterMode

    inputs = [torch.randn(shape)] * (2 if isinstance(layer, nn.Bilinear) else 1)
    if isinstance(layer, nn.Bilinear):
        assert clew.trace(layer, *inputs).macs == 3 * 6 * 4 * 4
        return
    with FlopCounterMode(display=False) as counter:
        layer(*inputs)
    assert 2 * clew.trace(layer, *inputs).macs == counter.get_total_flops()


def test_custom_functions_checkpoints_and_scripted_modules_are_seen():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    class Uses(nn.Module):
        def __init__(self, scripted):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.scripted = scripted

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.fc, Square.apply(x), use_reentrant=True)
            return self.scripted(x)

    class Twice(nn.Module):
        def forward(self, x):
            return x * 2 + 1

    with quiet():
        scripted = torch.jit.script(Twice())
    model = Uses(scripted)
    graph = clew.trace(model, torch.randn(2, 3, requires_grad=True), backward=True)
    assert [(each.name, each.op) for each in graph] == [
        ("Square", "Square"), ("fc", "linear"), ("scripted", "RecursiveScriptModule"),
    ]  # fmt: skip
    assert graph.operations[1].inputs[0] in graph.operations[0].outputs
    assert graph.tensor("fc.weight").grad_stats is not None
    assert model.fc.weight.grad is None


def test_modules_the_model_does_not_own_are_named_and_told():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(3, 3)]
            self.never = nn.Linear(3, 3)

        def forward(self, x):
            return self.layers[0](x)

    graph = clew.trace(Hidden(), torch.randn(2, 3))
    assert graph["Linear"].op == "linear"
    assert graph.tensor("Linear.weight").role == "param"
    assert "called but not registered in the model, so model.parameters() misses them: Linear" in graph.notes
    assert "parameters that took no part in this pass: never.weight, never.bias" in graph.notes


def test_lazy_modules_take_their_shape_and_say_so():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    graph = clew.trace(model, torch.randn(3, 6))
    assert kinds(graph) == ["linear", "batch_norm"]
    assert graph.parameters == 6 * 4 + 4 + 8
    assert "lazy parameters took their shape from this input and keep it: 0.weight" in graph.notes[-1]


def test_a_loss_module_without_parameters_is_no_cause_for_a_remark():
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return nn.MSELoss()(self.fc(x), x)

    assert clew.trace(Trains(), torch.ones(1, 2)).notes == ()


def test_wrapped_compiled_partial_and_methods():
    model = Net()
    x = torch.randn(2, 4)
    plain = clew.trace(model, x)
    compiled = clew.trace(torch.compile(model, backend="eager"), x)
    assert [each.name for each in compiled] == [each.name for each in plain]
    assert compiled.name == "Net"
    assert kinds(clew.trace(functools.partial(model, x))) == kinds(plain)
    assert clew.trace(model.blocks[0].forward, x)["fc"].site == "fc"


def test_loss_joins_the_graph():
    target = torch.tensor([0, 1])
    graph = clew.trace(Net(), torch.randn(2, 4), loss=lambda output: F.cross_entropy(output, target))
    assert kinds(graph)[-1] == "cross_entropy"
    assert graph.tensors[graph.outputs[-1]].shape == ()


def test_hugging_face_model_with_the_librarys_lines():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16)
    with quiet():
        model = transformers.GPT2LMHeadModel(config).eval()
        ids = torch.randint(0, 40, (1, 6))
        graph = clew.trace(model, ids, labels=ids.clone())
    assert "scaled_dot_product_attention" in kinds(graph)
    assert graph.tensor("lm_head.weight").name == "transformer.wte.weight"
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    attention = graph.find("transformer.h.0.attn.c_attn.*", op="addmm")[0]
    assert attention.source.startswith("transformers/")
    assert {graph.tensors[number].name for number in graph.inputs} == {"input_ids", "labels"}


def test_a_library_whose_name_begins_like_torch_is_not_torch():
    file = str(Path(torch.__file__).parent) + "vision/models.py"
    namespace = {}
    exec(compile("def forward(x):\n    return x.relu()\n", file, "exec"), namespace)
    assert clew.trace(namespace["forward"], torch.ones(1))["relu"].source == "torchvision/models.py:2"


def test_a_tensor_gives_the_graph_behind_it():
    model = Net()
    loss = F.cross_entropy(model(torch.randn(2, 4)), torch.tensor([0, 1]))
    graph = clew.trace(loss, model=model)
    assert kinds(graph)[0] == "native_layer_norm"
    assert kinds(graph)[-2:] == ["log_softmax", "nll_loss"]
    assert graph.tensor("head.weight").shape == (3, 4)
    assert graph.tensors[graph.outputs[0]].shape == ()
    assert "parts without gradient and most arguments are unknown" in graph.notes[0]
    assert graph.operations[-1].depth == max(operation.depth for operation in graph)
    with pytest.raises(clew.ClewError, match="no graph behind it"):
        clew.trace(torch.ones(3))


def test_exported_program_and_fx_graph():
    model = Net().eval()
    x = torch.randn(2, 4)
    traced = clew.trace(model, x)
    exported = clew.trace(torch.export.export(model, (x,)))
    assert [each.name for each in exported] == [each.name for each in traced]
    assert [each.source for each in exported] == [each.source for each in traced]
    assert exported.macs == traced.macs
    assert exported.parameters == traced.parameters
    module = torch.fx.symbolic_trace(model)
    assert [each.name for each in clew.trace(module)] == [each.name for each in traced]
    assert "give inputs to see shapes" in clew.trace(module).notes[0]
    assert kinds(clew.trace(module, x)) == kinds(traced)


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(clew.ClewError, match="cannot trace a SimpleNamespace"):
        clew.trace(SimpleNamespace())
    assert "torch" in sys.modules
