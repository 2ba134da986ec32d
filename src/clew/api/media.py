"""The user's own pictures, figures and histograms into the run that is being recorded."""

from __future__ import annotations

from clew.capture.torch.taps_media import log_figure, log_histogram, log_image

__all__ = ["log_figure", "log_histogram", "log_image"]
