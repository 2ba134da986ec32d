"""The network of NNabla's debugging tutorial in PyTorch, and the same walk around it with clew.

A residual network for images of 128 x 128: a first convolution, four blocks of three convolutions that
double the channels each time, with a convolution on the shortcut and pooling after each, and a classifier
for 100 classes. One forward pass calls 57 functions.

    python examples/nnabla_tutorial.py
    clew pprint examples/nnabla_tutorial.py:make_model --input 4,3,128,128
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import clew


def conv3x3(wide_in, wide_out):
    return nn.Conv2d(wide_in, wide_out, kernel_size=3, padding=1, bias=False)


class Unit(nn.Module):
    """A convolution and its normalisation, and a ReLU unless it is the last of a branch."""

    def __init__(self, wide_in, wide_out, *, is_last=False):
        super().__init__()
        self.conv = conv3x3(wide_in, wide_out)
        self.bn = nn.BatchNorm2d(wide_out)
        self.is_last = is_last

    def forward(self, x):
        h = self.bn(self.conv(x))
        return h if self.is_last else F.relu(h)


class Block(nn.Module):
    """Three units in a row beside a shortcut of one: 12 functions."""

    def __init__(self, wide_in, maps):
        super().__init__()
        self.add_module("in-block-1", Unit(wide_in, maps))
        self.add_module("in-block-2", Unit(maps, maps // 2))
        self.add_module("in-block-3", Unit(maps // 2, maps, is_last=True))
        self.skip = Unit(wide_in, maps, is_last=True)

    def forward(self, x):
        h = x
        for number in (1, 2, 3):
            h = getattr(self, f"in-block-{number}")(h)
        return F.relu(h + self.skip(x))


class Network(nn.Module):
    def __init__(self, maps=16, classes=100):
        super().__init__()
        self.add_module("first-conv", conv3x3(3, maps))
        self.add_module("first-bn", nn.BatchNorm2d(maps))
        for number in range(4):
            self.add_module(f"block-{number}", Block(maps * 2**number, maps * 2 ** (number + 1)))
        self.pred = nn.Linear(maps * 16, classes)

    def forward(self, x):
        h = F.relu(getattr(self, "first-bn")(getattr(self, "first-conv")(x)))
        for number in range(4):
            h = F.max_pool2d(getattr(self, f"block-{number}")(h), 2)
        return self.pred(h.mean(dim=(2, 3)))


def make_model():
    torch.manual_seed(0)
    return Network()


def print_function(function):
    print("==========")
    print(function.type, function.name)
    print(*(f"{tensor.name}{tensor.shape}" for tensor in function.inputs))
    print(*(f"{tensor.name}{tensor.shape}" for tensor in function.outputs))
    print(function.args)


def visit(model, x):
    """Look at every function in forward order, or stop at the first that fits."""
    graph = clew.trace(model, x)
    graph.visit(print_function)
    print(f"{len(graph)} functions")
    print("uses dropout:", graph.visit_check(lambda function: function.type == "dropout"))
    print("convolutions of block-0:", [each.name for each in graph.find("block-0.*", op="conv2d")])
    return graph


def draw(graph, folder):
    """Draw the network, and once more with arguments and what needs a gradient."""
    print("picture:", graph.save(folder / "network.svg"))
    print("page with all details:", graph.save(folder / "network.html", verbose=True))


def find_bottlenecks(graph):
    """Name the functions that multiply and move the most."""
    for what in ("macs", "bytes"):
        worst = max(graph, key=lambda function: getattr(function, what))
        print(f"most {what}: {worst.name} with {getattr(worst, what):,}, called at {worst.source}")


def find_bad_values(model, x):
    """Return the functions with NaN or Inf in an output or in its gradient, the first of each pass first."""
    graph = clew.trace(model, x, summary=True, backward=True)
    forward = [each.name for each in graph if any(is_bad(tensor.stats) for tensor in each.outputs)]
    backward = [each.name for each in graph if any(is_bad(tensor.grad_stats) for tensor in each.outputs)]
    return forward, backward[::-1]


def is_bad(stats):
    return stats is not None and stats["nan"] + stats["pos_inf"] + stats["neg_inf"] > 0


def main(size=128, folder=Path()):
    model = make_model()
    x = torch.randn(4, 3, size, size)
    graph = visit(model, x)
    clew.pprint(model, x, summary=True, backward=True, depth=1)
    draw(graph, folder)
    find_bottlenecks(graph)
    print("NaN or Inf:", find_bad_values(model, x))
    x[0, 0, 0, 0] = float("inf")
    print("the same with a bad pixel, first of each pass:", [names[0] for names in find_bad_values(model, x)])


if __name__ == "__main__":
    main()
