"""What an operation costs: multiply-adds of matrix products and convolutions, and bytes read and written.

Everything else (normalisation, activation, addition) has no multiply-adds here: it is paid for in bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from clew.capture.torch.trace_recorder import Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.model.graph import TensorNode

Shape = tuple[int, ...]


class _Call:
    """The arguments of a call by name and position, as shapes where they were tensors."""

    __slots__ = ("by_number", "named", "outputs", "shapes")

    def __init__(self, named: dict[str, Any], inputs: list[TensorNode], outputs: list[TensorNode]) -> None:
        self.named = named
        self.by_number = {tensor.id: tensor.shape for tensor in inputs}
        self.shapes = [tensor.shape for tensor in inputs]
        self.outputs = [tensor.shape for tensor in outputs]

    @property
    def made(self) -> int:
        """Elements of the first output."""
        return math.prod(self.outputs[0])


def count_macs(op: str, named: dict[str, Any], inputs: list[TensorNode], outputs: list[TensorNode]) -> int:
    """Return the multiply-adds of a call, 0 for an operation that multiplies no matrices."""
    formula = _FORMULAS.get(op.rstrip("_"))
    if formula is None or not outputs:
        return 0
    try:
        return int(formula(_Call(named, inputs, outputs)))
    except (IndexError, KeyError, ValueError):
        # An unusual way to call a function we know: no number is better than a wrong one.
        return 0


def count_bytes(op: str, inputs: list[TensorNode], outputs: list[TensorNode], *, is_view: bool) -> int:
    """Return the bytes a call read and wrote; a view moves nothing, a lookup reads only the rows it takes."""
    if is_view:
        return 0
    written = sum([tensor.bytes for tensor in outputs])
    if op in _LOOKUPS:
        indices = sum(tensor.bytes for tensor in inputs if tensor.dtype.startswith("int"))
        return 2 * written + indices
    read = inputs if len(inputs) < 2 else {tensor.id: tensor for tensor in inputs}.values()
    return written + sum([tensor.bytes for tensor in read])


_LOOKUPS: Final = frozenset({"embedding", "embedding_bag", "index_select", "gather"})


def _convolution(call: _Call) -> int:
    return call.made * math.prod(call.shapes[1][1:])


def _transposed_convolution(call: _Call) -> int:
    return math.prod(call.shapes[0]) * math.prod(call.shapes[1][1:])


def _any_convolution(call: _Call) -> int:
    return _transposed_convolution(call) if call.named.get("transposed") else _convolution(call)


def _product(call: _Call) -> int:
    return call.made * call.shapes[0][-1]


def _added_product(call: _Call) -> int:
    return call.made * call.shapes[1][-1]


def _summed_product(call: _Call) -> int:
    return call.made * call.shapes[1][-1] * call.shapes[1][0]


def _linear(call: _Call) -> int:
    return call.made * call.shapes[1][-1]


def _bilinear(call: _Call) -> int:
    return call.made * call.shapes[0][-1] * call.shapes[1][-1]


def _outer(call: _Call) -> int:
    return call.made


def _contraction(call: _Call) -> int:
    first, second = (math.prod(shape) for shape in call.shapes[:2])
    return call.made * round(math.sqrt(first * second / call.made)) if call.made else 0


def _attention(call: _Call) -> int:
    query, key, value = call.shapes[:3]
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _multi_head_attention(call: _Call) -> int:
    query, key, value = call.shapes[:3]
    width = query[-1]
    queries, keys = math.prod(query[:-1]), math.prod(key[:-1])
    batch = query[1] if len(query) == 3 else 1
    projections = 2 * queries * width * width + keys * width * (key[-1] + value[-1])
    return projections + 2 * queries * (keys // batch) * width


def _recurrent(call: _Call) -> int:
    """Each step multiplies every weight matrix once; weights come as one list of matrices and biases."""
    steps = math.prod(call.shapes[0][:-1])
    listed = [
        call.by_number[ref]
        for value in call.named.values()
        if isinstance(value, tuple)
        for ref in _refs(value)
    ]
    return steps * sum(math.prod(shape) for shape in listed if len(shape) == 2)


def _recurrent_cell(call: _Call) -> int:
    batch = math.prod(call.shapes[0][:-1])
    return batch * sum(math.prod(call.by_number[call.named[name]]) for name in ("w_ih", "w_hh"))


def _einsum(call: _Call) -> int:
    """Each element of the output sums over the letters that are not in it."""
    equation = str(next(value for value in call.named.values() if isinstance(value, str))).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) < 2:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, call.shapes, strict=False):
        head, _, tail = term.partition("...")
        sizes.update(zip(head, shape, strict=False))
        sizes.update(zip(reversed(tail), reversed(shape), strict=False))
    kept = set(right) if arrow else {letter for letter in left if left.count(letter) == 1}
    return call.made * math.prod(size for letter, size in sizes.items() if letter not in kept)


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _refs(each)


_FORMULAS: Final[dict[str, Callable[[_Call], int]]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    **dict.fromkeys(("convolution", "_convolution"), _any_convolution),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "inner", "vdot"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _added_product),
    "addbmm": _summed_product,
    "linear": _linear,
    "bilinear": _bilinear,
    **dict.fromkeys(("outer", "ger"), _outer),
    "tensordot": _contraction,
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _recurrent_cell),
    "einsum": _einsum,
}
