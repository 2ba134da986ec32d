"""Graphs made by hand: chains, residual blocks and transformers of any size, without torch."""

from __future__ import annotations

from clew.model.graph import Graph, ModuleNode, Operation, TensorNode


class Maker:
    """Builds a graph operation by operation, as a trace would."""

    def __init__(self, name="model"):
        self.name = name
        self.operations, self.tensors = [], []
        self.modules = {"": ModuleNode("", name, calls=1)}
        self.inputs, self.outputs = [], []

    def tensor(self, name, shape, *, role="value", dtype="float32", producer=-1, stats=None, needs_grad=True):
        node = TensorNode(
            len(self.tensors), name, role, tuple(shape), dtype, "cpu", needs_grad, producer, stats
        )
        self.tensors.append(node)
        return node.id

    def input(self, name, shape, dtype="float32"):
        self.inputs.append(self.tensor(name, shape, role="input", dtype=dtype, needs_grad=False))
        return self.inputs[-1]

    def module(self, path, kind):
        known = self.modules.get(path)
        self.modules[path] = ModuleNode(path, kind, calls=(known.calls if known else 0) + 1)
        return self.modules[path].calls - 1

    def op(
        self,
        op,
        inputs,
        shape,
        *,
        site="",
        call=0,
        params=(),
        args=None,
        stats=None,
        outputs=1,
        source="model.py:1",
    ):
        number = len(self.operations)
        name = f"{site}.{op}_{number}".strip(".")
        given = [*inputs, *(self.tensor(f"{site}.{n}", s, role=r) for n, s, r in params)]
        made = [self.tensor(name, shape, producer=number, stats=stats) for _ in range(outputs)]
        self.operations.append(
            Operation(
                number, name, op, tuple(given), tuple(made), args or {}, site, call, source, f"{op}(x)", True
            )
        )
        return made[0] if outputs == 1 else made

    def layer(self, kind, op, inputs, shape, path, params=(), **more):
        call = self.module(path, kind)
        return self.op(op, inputs, shape, site=path, call=call, params=params, **more)

    def finish(self, *outputs):
        return Graph(
            self.name, tuple(self.operations), tuple(self.tensors), tuple(self.modules.values()),
            tuple(self.inputs), tuple(outputs),
        )  # fmt: skip


def linear(maker, x, out, path, width):
    shape = (*maker.tensors[x].shape[:-1], out)
    params = [("weight", (out, width), "param"), ("bias", (out,), "param")]
    return maker.layer("Linear", "linear", [x], shape, path, params)


def transformer(blocks=12, width=64, heads=4, batch=2, time=16):
    """A decoder with pre-norm blocks."""
    m = Maker("GPT")
    tokens = m.input("tokens", (batch, time), "int64")
    shape = (batch, time, width)
    x = m.layer("Embedding", "embedding", [tokens], shape, "wte", [("weight", (100, width), "param")])
    position = m.layer("Embedding", "embedding", [tokens], shape, "wpe", [("weight", (time, width), "param")])
    x = m.op("add", [x, position], shape)
    norm = [("weight", (width,), "param"), ("bias", (width,), "param")]
    for index in range(blocks):
        b = f"h.{index}"
        m.module(b, "Block")
        y = m.layer("LayerNorm", "layer_norm", [x], shape, f"{b}.ln_1", norm)
        a = f"{b}.attn"
        m.module(a, "CausalSelfAttention")
        y = linear(m, y, 3 * width, f"{a}.c_attn", width)
        parts = m.op("split", [y], shape, site=a, outputs=3, args={"split_size": width, "dim": 2})
        split = (batch, heads, time, width // heads)
        q, k, v = (
            m.op("transpose", [m.op("view", [p], split, site=a)], split, site=a, args={"dim0": 1, "dim1": 2})
            for p in parts
        )
        y = m.op("scaled_dot_product_attention", [q, k, v], split, site=a, args={"is_causal": True})
        y = m.op("reshape", [m.op("transpose", [y], split, site=a)], shape, site=a)
        y = linear(m, y, width, f"{a}.c_proj", width)
        x = m.op("add", [x, y], shape, site=b)
        y = m.layer("LayerNorm", "layer_norm", [x], shape, f"{b}.ln_2", norm)
        m.module(f"{b}.mlp", "MLP")
        y = linear(m, y, 4 * width, f"{b}.mlp.c_fc", width)
        y = m.layer("GELU", "gelu", [y], (batch, time, 4 * width), f"{b}.mlp.act")
        y = linear(m, y, width, f"{b}.mlp.c_proj", 4 * width)
        x = m.op("add", [x, y], shape, site=b)
    x = m.layer("LayerNorm", "layer_norm", [x], shape, "ln_f", norm)
    logits = linear(m, x, 100, "lm_head", width)
    return m.finish(logits)


def convolution(m, x, out, path, *, stats=None):
    batch, given, *size = m.tensors[x].shape
    params = [("weight", (out, given, 3, 3), "param")]
    args = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    return m.layer("Conv2d", "conv2d", [x], (batch, out, *size), path, params, args=args, stats=stats)


def norm_relu(m, x, path, relu):
    shape = m.tensors[x].shape
    params = [(n, (shape[1],), r) for n, r in (
        ("weight", "param"), ("bias", "param"), ("running_mean", "buffer"), ("running_var", "buffer"))]  # fmt: skip
    x = m.layer("BatchNorm2d", "batch_norm", [x], shape, path, params, args={"training": True, "eps": 1e-5})
    return m.op("relu", [x], shape, site=relu) if relu is not None else x


def residual(blocks=4, channels=16):
    """The residual network of the NNabla tutorial: an even block halves the picture."""
    m = Maker("ResNet")
    x = m.input("x", (4, 3, 32, 32))
    x = norm_relu(m, convolution(m, x, channels, "conv1"), "bn1", "")
    for index in range(blocks):
        b = f"block-{index}"
        m.module(b, "Block")
        y = norm_relu(m, convolution(m, x, channels // 2, f"{b}.conv1"), f"{b}.bn1", b)
        y = norm_relu(m, convolution(m, y, channels // 2, f"{b}.conv2"), f"{b}.bn2", b)
        y = norm_relu(m, convolution(m, y, channels, f"{b}.conv3"), f"{b}.bn3", None)
        shape = m.tensors[x].shape
        x = m.op("relu", [m.op("add", [y, x], shape, site=b)], shape, site=b)
        if index % 2:
            half = (*shape[:2], shape[2] // 2, shape[3] // 2)
            x = m.op("max_pool2d", [x], half, args={"kernel_size": 2})
    x = m.op("avg_pool2d", [x], (4, channels, 1, 1), args={"kernel_size": m.tensors[x].shape[-1]})
    x = m.op("flatten", [x], (4, channels), args={"start_dim": 1})
    return m.finish(linear(m, x, 10, "fc", channels))


def nested(operations=2000, per_block=20, per_stage=10):
    """Stages of blocks of operations with a skip in every block: any number of operations."""
    m = Maker("Deep")
    x = m.input("x", (8, 64))
    shape = (8, 64)
    for number in range(-(-operations // per_block)):
        stage, block = divmod(number, per_stage)
        b = f"stages.{stage}.blocks.{block}"
        if block == 0:
            m.module(f"stages.{stage}", "Stage")
        m.module(b, "Block")
        y = x
        for step in range(per_block - 1):
            if step % 3 == 0:
                y = linear(m, y, 64, f"{b}.fc{step}", 64)
            else:
                y = m.op(("relu", "mul")[step % 2], [y], shape, site=b)
        x = m.op("add", [x, y], shape, site=b)
    return m.finish(x)


def chain(operations):
    """A flat chain without modules."""
    m = Maker("Chain")
    x = m.input("x", (8, 4))
    for index in range(operations):
        x = m.op(("relu", "sin", "mul")[index % 3], [x], (8, 4))
    return m.finish(x)
