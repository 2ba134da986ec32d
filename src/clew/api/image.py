"""Weights, activations and attention as pictures: for a file, a notebook or the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from clew.errors import ClewError, UsageError, suggest
from clew.model.glob import compile_globs, split_patterns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from clew.views.image_grid import ImageGrid


@final
class Picture:
    """A picture of arrays: save it, look at it in a notebook, put it into the run, or take the arrays."""

    def __init__(self, title: str, png: bytes, arrays: dict[str, NDArray[Any]]) -> None:
        self.title = title
        self.png = png
        self.arrays = arrays

    def save(self, path: str | Path) -> Path:
        """Write the picture as a PNG file and return its path."""
        return _write(self.png, path)

    def log(self, name: str) -> bool:
        """Write the picture into the run that is being recorded; return whether there is one."""
        from clew.api.media import log_image

        return log_image(name, self.png)

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in self.arrays.items())
        return f"<Picture {self.title}: {shapes}>"


@final
class AttentionMaps(Mapping[str, "NDArray[np.float32]"]):
    """Attention weights by layer, each (batch, head, query, key); ``heads`` are the numbers of the kept heads."""

    def __init__(self, maps: dict[str, NDArray[np.float32]], *, heads: tuple[int, ...] | None = None) -> None:
        self._maps = maps
        self.heads = heads

    def __getitem__(self, layer: str) -> NDArray[np.float32]:
        if layer not in self._maps:
            hint = suggest(layer, self._maps) or f"one of: {', '.join(list(self._maps)[:8])}"
            raise UsageError(f"no attention '{layer}'", next_step=hint)
        return self._maps[layer]

    def __contains__(self, layer: object) -> bool:
        return layer in self._maps

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in list(self._maps.items())[:3])
        return f"<AttentionMaps of {len(self)} layers: {shapes}{', …' if len(self) > 3 else ''}>"

    def picture(self, *, sample: int = 0, layers: str = "*") -> Picture:
        """Return one sample as a picture: a row for each layer, a map for each head."""
        from clew.views.image_grid import grid_of_attention

        fits = compile_globs(split_patterns(layers))
        chosen = {name: array for name, array in self._maps.items() if fits(name)}
        if not chosen:
            raise UsageError(f"no layer fits '{layers}'", next_step=f"the layers are {', '.join(self._maps)}")
        batch = min(len(array) for array in chosen.values())
        if not -batch <= sample < batch:
            raise UsageError(f"there is no sample {sample}", next_step=f"the batch has {batch}")
        maps = [(name, array[sample]) for name, array in chosen.items()]
        grid = grid_of_attention(maps, heads=self.heads, title=f"attention, sample {sample}")
        return _draw(grid, dict(maps))

    def save(self, path: str | Path, *, sample: int = 0, layers: str = "*") -> Path:
        """Write one sample as a PNG file and return its path."""
        return self.picture(sample=sample, layers=layers).save(path)

    def log(self, name: str, *, sample: int = 0) -> bool:
        """Write one sample into the run that is being recorded; return whether there is one."""
        return self.picture(sample=sample).log(name)

    def _repr_png_(self) -> bytes:
        return self.picture().png


def attention(
    model: Any,
    /,
    *inputs: Any,
    layers: str = "*",
    heads: Sequence[int] | None = None,
    **kwargs: Any,
) -> AttentionMaps:
    """Run a model once and return its attention weights by layer and head; the model is left as it was.

    ``layers`` is a pattern of module paths and ``heads`` the numbers of the heads to keep; other keywords are
    inputs of the model. Dropout is left out of the weights.
    """
    from clew.capture.torch.attention import record_attention

    fits = compile_globs(split_patterns(layers))
    wanted = None if heads is None else tuple(heads)
    try:
        records, sites = record_attention(model, inputs, kwargs, is_wanted=fits, heads=wanted)
    except ClewError:
        raise
    except Exception as error:
        from clew.capture.torch.activation import locate_failure

        raise locate_failure(model, inputs, kwargs, error) from error
    if not records:
        raise _nothing_found(type(model).__name__, layers, sites)
    return AttentionMaps({record.site: record.weights for record in records}, heads=wanted)


def _nothing_found(name: str, layers: str, sites: list[str]) -> UsageError:
    if sites:
        near = suggest(layers, sites)
        return UsageError(
            f"no attention at '{layers}' in {name}", next_step=near or f"it is at: {', '.join(sites[:8])}"
        )
    return UsageError(
        f"no attention found in {name}",
        next_step="clew sees nn.MultiheadAttention, F.scaled_dot_product_attention and softmax(…) @ values; "
        "for Hugging Face models choose attn_implementation='sdpa' or 'eager'",
    )


def filters(layer: Any, *, most: int = 64) -> Picture:
    """Return the weights of a convolution (or any layer or tensor with some) as a picture, one tile each."""
    from clew.views.image_grid import grid_of_filters

    weight = getattr(layer, "weight", layer)
    if not hasattr(weight, "shape"):
        raise UsageError(
            f"a {type(layer).__name__} has no weights to draw", next_step="give a layer or a tensor"
        )
    name = "weight" if weight is layer else f"{type(layer).__name__} weight"
    values = _as_array(weight, name)
    return _draw(grid_of_filters(values, name, most=most), {"weight": values})


def activations(model: Any, inputs: Any, site: str, *, sample: int = 0, most: int = 64) -> Picture:
    """Run a model once and return what a site gave for one sample, a tile for each channel.

    ``inputs`` is a tensor, a tuple of arguments or a dict of named ones. The model is left as it was.
    """
    from clew.capture.torch.activation import record_output
    from clew.views.image_grid import grid_of_activations

    values = record_output(model, inputs, site)
    if values.ndim == 0 or not -len(values) <= sample < len(values):
        size = len(values) if values.ndim else 0
        raise UsageError(f"there is no sample {sample}", where=site, next_step=f"the batch has {size}")
    grid = grid_of_activations(values[sample], f"{site} of sample {sample}", most=most)
    return _draw(grid, {"output": values})


def histogram(x: Any, name: str = "", *, bins: int = 60) -> Picture:
    """Return how the elements of a tensor or array are spread; its arrays are ``counts`` and ``edges``."""
    from clew.render.png import render_png
    from clew.views.histogram_chart import count_values, draw_histogram

    if bins < 1:
        raise UsageError(f"a histogram cannot have {bins} bins", where=name, next_step="give 1 or more")
    dtype = str(getattr(x, "dtype", "")).removeprefix("torch.")
    counted = count_values(_as_array(x, name), name, bins=bins, dtype=dtype)
    png = render_png(draw_histogram(counted))
    return Picture(name or "histogram", png, {"counts": counted.counts, "edges": counted.edges})


def _as_array(x: Any, where: str) -> NDArray[Any]:
    if hasattr(x, "detach"):
        from clew.capture.torch.activation import to_numpy

        return to_numpy(x, where)
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{array.dtype} values cannot be drawn", where=where, next_step="give real numbers")
    return array


def _draw(grid: ImageGrid, arrays: dict[str, NDArray[Any]]) -> Picture:
    from clew.render.image_png import draw_grid
    from clew.render.png import encode_pixels

    return Picture(grid.title, encode_pixels(draw_grid(grid)), arrays)


def _write(png: bytes, path: str | Path) -> Path:
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise UsageError(
            "this picture is saved as PNG", where=str(target), next_step="end the name with .png"
        )
    try:
        target.write_bytes(png)
    except OSError as error:
        raise UsageError(
            f"cannot write the picture: {error.strerror}", where=str(target), next_step="choose another path"
        ) from error
    return target
