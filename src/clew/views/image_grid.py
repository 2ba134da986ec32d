"""Tables of small pictures with labels: filters, activations and attention as things to look at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.errors import UsageError
from clew.views.color_map import BAD, ColorScale, choose_scale, colorize, shrink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.floating]
    Pixels = NDArray[np.uint8]

LARGEST: Final = 512
"""Rows and columns of one picture at most; larger ones are averaged over blocks."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One picture, (height, width, 3) bytes, and what stands below it."""

    pixels: Pixels
    label: str = ""


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """Rows of pictures; ``labels`` name the rows, ``scale`` says what the colours mean."""

    title: str
    rows: tuple[tuple[Tile, ...], ...]
    labels: tuple[str, ...] = ()
    scale: ColorScale | None = None
    notes: tuple[str, ...] = ()


def grid_of_filters(weight: Array, name: str, *, most: int = 64) -> ImageGrid:
    """Return the filters of a convolution, one picture for each, or the matrix of a linear layer as one picture.

    Filters of three inputs are shown in colour. Of the others each input is a picture of its own, one row for
    each output.
    """
    weight = _check(weight, name)
    if weight.ndim <= 2:
        return grid_of_matrix(np.atleast_2d(weight), name)
    scale = choose_scale(weight)
    # Filters over time have one row, filters over space and time are laid out in slices.
    planes = weight.reshape(*weight.shape[:2], -1, weight.shape[-1])
    outs, ins = planes.shape[:2]
    if ins == 3 and weight.ndim == 4:
        tiles = [Tile(_as_rgb(planes[i], scale), str(i)) for i in range(min(outs, most))]
        meaning = f"red, green and blue: the 3 inputs, from {scale.low:.3g} to {scale.high:.3g}"
        bad = ("magenta: NaN or infinite",) if scale.has_bad else ()
        notes = (meaning, *bad, *_left_out(outs, most, "filters"))
        return ImageGrid(_title(name, weight), _wrap(tiles), notes=notes)
    columns = min(ins, 16)
    shown = min(outs, max(1, most // columns))
    rows = tuple(
        tuple(
            Tile(colorize(planes[i, j], scale), f"in {j}" if i == shown - 1 else "") for j in range(columns)
        )
        for i in range(shown)
    )
    if ins == 1:
        rows = _wrap([Tile(row[0].pixels, str(i)) for i, row in enumerate(rows)])
    notes = _left_out(outs, shown, "filters") + _left_out(ins, columns, "inputs")
    labels = tuple(f"out {i}" for i in range(shown)) if ins > 1 else ()
    return ImageGrid(_title(name, weight), rows, labels, scale, notes)


def grid_of_activations(values: Array, name: str, *, most: int = 64) -> ImageGrid:
    """Return what a site gave for one sample: a picture for each channel, or one table of numbers."""
    values = _check(values, name)
    if values.ndim <= 2:
        return grid_of_matrix(np.atleast_2d(values), name)
    scale = choose_scale(values)
    planes = values.reshape(-1, *values.shape[-2:])
    tiles, block = _make_tiles(planes[:most], scale)
    notes = _left_out(len(planes), most, "channels") + _averaged(block)
    return ImageGrid(_title(name, values), _wrap(tiles), scale=scale, notes=notes)


def grid_of_matrix(values: Array, name: str) -> ImageGrid:
    """Return a table of numbers as one picture."""
    scale = choose_scale(values)
    tiles, block = _make_tiles(values[None], scale)
    return ImageGrid(_title(name, values), ((Tile(tiles[0].pixels),),), scale=scale, notes=_averaged(block))


def grid_of_attention(
    maps: Sequence[tuple[str, Array]], *, heads: Sequence[int] | None = None, title: str = "attention"
) -> ImageGrid:
    """Return attention maps (head, query, key) as a row for each layer and a picture for each head."""
    everything = np.concatenate([np.ravel(values) for _, values in maps])
    scale = choose_scale(everything, low=0.0)
    rows, largest = [], 1
    is_even = len({len(values) for _, values in maps}) == 1
    for index, (_, values) in enumerate(maps):
        tiles, block = _make_tiles(values, scale)
        numbers = heads if heads is not None else range(len(tiles))
        # In an even table the last row names the heads of all.
        is_named = not is_even or index == len(maps) - 1
        names = (f"head {number}" if is_named else "" for number in numbers)
        rows.append(tuple(Tile(tile.pixels, name) for tile, name in zip(tiles, names, strict=False)))
        largest = max(largest, block)
    notes = ("rows are queries, columns are keys", *_averaged(largest))
    return ImageGrid(title, tuple(rows), tuple(name for name, _ in maps), scale, notes)


def _check(values: Array, name: str) -> Array:
    if not values.size:
        raise UsageError(
            f"there is nothing to draw: the shape is {tuple(values.shape)}",
            where=name,
            next_step="give values",
        )
    return values.astype(np.float64, copy=False)


def _make_tiles(planes: Array, scale: ColorScale) -> tuple[list[Tile], int]:
    tiles, block = [], 1
    for index, plane in enumerate(planes):
        small, block = shrink(plane, LARGEST)
        tiles.append(Tile(colorize(small, scale), str(index)))
    return tiles, block


def _as_rgb(planes: Array, scale: ColorScale) -> Pixels:
    span = scale.high - scale.low
    good = np.isfinite(planes).all(axis=0)
    values = np.where(np.isfinite(planes), planes, scale.low)
    shares = (values - scale.low) / span if span > 0 else np.full(values.shape, 0.5)
    pixels = np.rint(np.moveaxis(shares, 0, -1) * 255)
    pixels[~good] = BAD
    return pixels.astype(np.uint8)


def _wrap(tiles: list[Tile]) -> tuple[tuple[Tile, ...], ...]:
    """Return tiles in rows that make the whole about square."""
    height, width = tiles[0].pixels.shape[:2]
    across = max(1, min(len(tiles), math.ceil(math.sqrt(len(tiles) * height / width)), 16))
    return tuple(tuple(tiles[start : start + across]) for start in range(0, len(tiles), across))


def _title(name: str, values: Array) -> str:
    return f"{name}  {'×'.join(map(str, values.shape))}".strip()


def _left_out(total: int, shown: int, what: str) -> tuple[str, ...]:
    return (f"{shown} of {total} {what}",) if total > shown else ()


def _averaged(block: int) -> tuple[str, ...]:
    return (f"each pixel is the mean of {block} × {block} values",) if block > 1 else ()
