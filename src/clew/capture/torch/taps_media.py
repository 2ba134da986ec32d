"""Pictures, figures and histograms of the user's own into the run that is being recorded."""

from __future__ import annotations

import io
import math
from typing import Any, Final

import numpy as np
import torch

from clew.capture import current
from clew.capture.torch.check_report import plain
from clew.capture.torch.taps_compiled import tell_once
from clew.capture.torch.taps_value import blind_reason, header, measure, open_value, quietly
from clew.errors import UsageError
from clew.model.png import encode_png

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_BAD: Final = (255, 0, 255)
"""The colour of a pixel that is NaN or infinite: nobody mistakes it for a value."""


def log_image(name: str, image: Any) -> bool:
    """Write a picture of this step into the run; return whether there is one to write into.

    ``image`` is an array or tensor (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels, a batch of these (drawn as a
    grid), a PIL image, or the bytes of a PNG file. Floats from 0 to 1 are taken as they are, others are stretched from
    their least to their largest; NaN and infinities are drawn in magenta.
    """
    session = _find_session("clew.log_image")
    if session is None:
        return False
    session.add_media(name, _encode(image), ".png")
    return True


def log_figure(name: str, figure: Any, *, dpi: int = 100) -> bool:
    """Write a matplotlib figure, or what a notebook would show as PNG, into the run; return whether there is one."""
    session = _find_session("clew.log_figure")
    if session is None:
        return False
    data = _draw_figure(figure, dpi)
    if data is None:
        raise UsageError(
            f"clew.log_figure cannot draw a {type(figure).__name__}",
            where=name,
            next_step="give a matplotlib figure; clew.log_image takes arrays",
        )
    session.add_media(name, data, ".png")
    return True


def log_histogram(name: str, x: Any, *, bins: int = 64) -> bool:
    """Write how the finite elements of a tensor or array are spread into the run; return whether there is one."""
    if bins < 1:
        raise UsageError(f"a histogram cannot have {bins} bins", where=name, next_step="give 1 or more")
    session = _find_session("clew.log_histogram")
    if session is None:
        return False
    reason = blind_reason(x)
    if reason:
        raise UsageError(f"{header(x)} has no histogram: {reason}", where=name)
    session.note("histogram", {"name": name, **quietly(_count, x, bins)})
    return True


def _find_session(what: str) -> current.Session | None:
    session = current.active()
    if session is None:
        tell_once(
            what,
            f"{what}: nothing is being recorded here (clew run, or with clew.watch(…)), so nothing is kept",
        )
    return session


def _count(x: Any, bins: int) -> dict[str, Any]:
    array = _as_numpy(open_value(x)[0])
    values = array.astype(np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    counts, edges = np.histogram(values, bins)
    stats = {key: plain(value) for key, value in measure(array).items()}
    return {"tensor": header(x), "counts": counts.tolist(), "edges": edges.tolist(), "stats": stats}


def _as_numpy(array: Any) -> np.ndarray[Any, np.dtype[Any]]:
    if isinstance(array, torch.Tensor):
        array = array.float() if array.dtype is torch.bfloat16 else array
        array = array.cpu().resolve_conj().resolve_neg().numpy()
    if np.iscomplexobj(array):
        raise UsageError(
            "complex numbers have no place on one axis", next_step="give x.abs(), x.real or x.imag"
        )
    return np.asarray(array)


# ---------------------------------------------------------------- pictures


def _draw_figure(figure: Any, dpi: int) -> bytes | None:
    figure = getattr(figure, "figure", figure) if not hasattr(figure, "savefig") else figure
    if hasattr(figure, "savefig"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi)
        return buffer.getvalue()
    draw = getattr(figure, "_repr_png_", None)
    data = draw() if callable(draw) else None
    return data if isinstance(data, bytes) else None


def _encode(image: Any) -> bytes:
    if isinstance(image, (bytes, bytearray)):
        if not image.startswith(_SIGNATURE):
            raise UsageError(
                "these bytes are not a PNG file", next_step="give an array, a PIL image or PNG bytes"
            )
        return bytes(image)
    if hasattr(image, "save") and hasattr(image, "mode"):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return buffer.getvalue()
    if reason := blind_reason(image):
        raise UsageError(f"{header(image)} cannot be drawn: {reason}")
    pixels = _to_pixels(_lay_out(image))
    height, width, channels = pixels.shape
    return encode_png(pixels.tobytes(), width=width, height=height, channels=channels)


def _lay_out(image: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an image, or a batch as a grid, with the channels last."""
    array = quietly(lambda: _as_numpy(open_value(image)[0]))
    first = isinstance(image, torch.Tensor)
    if array.ndim == 4 and len(array):
        return _make_grid([_channels_last(each, image, first=first) for each in array])
    return _channels_last(array, image, first=first)


def _channels_last(array: Any, image: Any, *, first: bool) -> np.ndarray[Any, np.dtype[Any]]:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or not array.size or not {array.shape[0], array.shape[-1]} & {1, 3, 4}:
        raise UsageError(
            f"{header(image)} is not a picture",
            next_step="give (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels, or a batch of these",
        )
    # Where both ends could be the channels, tensors have them first and arrays last.
    if array.shape[-1] not in (1, 3, 4) or (first and array.shape[0] in (1, 3, 4) and image.ndim > 2):
        array = np.moveaxis(array, 0, -1)
    return np.asarray(array)


def _make_grid(images: list[np.ndarray[Any, np.dtype[Any]]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the images side by side in a square, with a line of zeros between them."""
    across = math.ceil(math.sqrt(len(images)))
    down = math.ceil(len(images) / across)
    height, width, channels = images[0].shape
    grid = np.zeros((down * (height + 1) - 1, across * (width + 1) - 1, channels), images[0].dtype)
    for position, image in enumerate(images):
        top, left = position // across * (height + 1), position % across * (width + 1)
        grid[top : top + height, left : left + width] = image
    return grid


def _to_pixels(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes: uint8 as it is, truth values black and white, other numbers as shares of the range they fill."""
    if array.dtype == np.uint8:
        return array
    values = array.astype(np.float64)
    good = np.isfinite(values)
    low, high = (values[good].min(), values[good].max()) if good.any() else (0.0, 1.0)
    if array.dtype.kind == "b" or (array.dtype.kind == "f" and low >= 0 and high <= 1):
        low, high = 0.0, 1.0
    shares = (np.where(good, values, low) - low) / ((high - low) or 1.0)
    pixels = np.round(shares * 255).astype(np.uint8)
    if good.all():
        return pixels
    bad = ~good.all(axis=2)
    colour = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3].copy()
    colour[bad] = _BAD
    return colour
