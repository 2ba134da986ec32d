"""Element types of checkpoints: what carries them in numpy, and how their bits become numbers.

numpy knows neither bfloat16 nor the 8- and 4-bit floats, so a tensor of those is an array of unsigned
integers (its *carrier*) until ``widen`` turns a block of it into float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type: name as torch writes it, numpy carrier, and for floats the stored mantissa bits.

    ``packed`` is how many numbers one carrier element holds; ``smallest`` the smallest normal magnitude.
    """

    name: str
    carrier: str
    kind: str
    mantissa: int = 0
    smallest: float = 0.0
    packed: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one carrier element."""
        return np.dtype(self.carrier).itemsize

    @property
    def is_float(self) -> bool:
        """Whether values are real floating-point numbers."""
        return self.kind == "float"

    @property
    def is_native(self) -> bool:
        """Whether numpy computes with the carrier as it is."""
        return not (self.is_float and self.carrier[1] == "u")


_FLOATS: Final = (
    ElementType("float64", "<f8", "float", 52, 2.0**-1022),
    ElementType("float32", "<f4", "float", 23, 2.0**-126),
    ElementType("float16", "<f2", "float", 10, 2.0**-14),
    ElementType("bfloat16", "<u2", "float", 7, 2.0**-126),
    ElementType("float8_e4m3fn", "|u1", "float", 3, 2.0**-6),
    ElementType("float8_e5m2", "|u1", "float", 2, 2.0**-14),
    ElementType("float8_e4m3fnuz", "|u1", "float", 3, 2.0**-7),
    ElementType("float8_e5m2fnuz", "|u1", "float", 2, 2.0**-15),
    ElementType("float8_e8m0fnu", "|u1", "float", 0, 2.0**-127),
    ElementType("float4_e2m1fn_x2", "|u1", "float", 1, 1.0, packed=2),
)
_INTEGERS: Final = tuple(
    ElementType(f"{sign}int{8 * size}", f"{'|' if size == 1 else '<'}{code}{size}", "integer")
    for sign, code in (("", "i"), ("u", "u"))
    for size in (1, 2, 4, 8)
)
_OTHERS: Final = (
    ElementType("bool", "|u1", "bool"),
    ElementType("complex64", "<c8", "complex", 23, 2.0**-126),
    ElementType("complex128", "<c16", "complex", 52, 2.0**-1022),
)

ELEMENT_TYPES: Final = {each.name: each for each in (*_FLOATS, *_INTEGERS, *_OTHERS)}
"""Every element type that can be read, by name."""


def from_numpy(dtype: np.dtype[Any]) -> ElementType | None:
    """Return the element type of a numpy dtype, or None when it is not one of numbers.

    A void of two bytes is what numpy makes of bfloat16 when the package that defines it is absent.
    """
    if dtype == np.dtype("V2"):
        return ELEMENT_TYPES["bfloat16"]
    return ELEMENT_TYPES.get(dtype.newbyteorder("=").name)


def widen(raw: NDArray[Any], element: ElementType) -> NDArray[Any]:
    """Return the numbers of a flat block: as they are where numpy can compute with them, else float32."""
    if element.is_native:
        return raw.astype(np.float32) if element.name == "float16" else raw
    if element.name == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    values: NDArray[Any] = _small_float_values(element.name)[raw]
    return values.reshape(-1) if element.packed > 1 else values


@cache
def _small_float_values(name: str) -> NDArray[np.float32]:
    """Return the value of each byte: one number, or for packed 4-bit floats the low and the high one."""
    bytes_ = np.arange(256)
    if name == "float4_e2m1fn_x2":
        nibble = _decode(np.arange(16), exponent_bits=2, mantissa_bits=1, bias=1)
        return np.stack([nibble[bytes_ & 15], nibble[bytes_ >> 4]], axis=1).astype(np.float32)
    if name == "float8_e8m0fnu":
        values = np.ldexp(1.0, bytes_ - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    exponent_bits, mantissa_bits = (4, 3) if "e4m3" in name else (5, 2)
    bias = 2 ** (exponent_bits - 1) - (0 if name.endswith("uz") else 1)
    values = _decode(bytes_, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, bias=bias)
    if name.endswith("uz"):
        values[0x80] = np.nan
    elif "e4m3" in name:
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[[0x7C, 0xFC]] = np.inf, -np.inf
        values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values.astype(np.float32)


def _decode(codes: NDArray[Any], *, exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float64]:
    """Return the values of a sign-exponent-mantissa code as if no code were special."""
    mantissa = codes & (2**mantissa_bits - 1)
    exponent = codes >> mantissa_bits & (2**exponent_bits - 1)
    sign = np.where(codes >> (mantissa_bits + exponent_bits), -1.0, 1.0)
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)
    return np.asarray(sign * np.ldexp(fraction, np.maximum(exponent, 1) - bias), dtype=np.float64)
