"""The words of the record: statistics, kinds, columns and the version of the format."""

from __future__ import annotations

from typing import Final

FORMAT_VERSION: Final = 1

STAT_NAMES: Final = (
    "count",
    "nan",
    "pos_inf",
    "neg_inf",
    "zero",
    "negative",
    "positive",
    "min",
    "max",
    "mean",
    "std",
    "abs_mean",
    "abs_max",
    "l2",
)
"""One row of numbers for a tensor, in this order, everywhere: the kernel, the step buffer, the reader."""

STAT_INDEX: Final = {name: index for index, name in enumerate(STAT_NAMES)}

COUNT_STATS: Final = STAT_NAMES[:7]
"""Counts are over all elements; ``negative`` and ``positive`` include the infinities of that sign."""

VALUE_STATS: Final = STAT_NAMES[7:]
"""Values are over the finite elements, and NaN where there are none."""

DERIVED_STATS: Final = ("positive", "abs_max")
"""Not stored: follow from the other counts, and from min and max."""

KINDS: Final = (
    "input",
    "output",
    "grad_output",
    "param",
    "grad",
    "update",
    "buffer",
    "state",
    "loss",
    "batch",
)
"""What of a site was measured. The position in this tuple is the number on disk: append, never reorder."""

KIND_INDEX: Final = {name: index for index, name in enumerate(KINDS)}

PARAMETER_KINDS: Final = ("param", "grad", "update", "state")

MODES: Final = ("train", "eval")
"""Whether the root module was in training mode when the record was made."""

HIST_MAGNITUDES: Final = 64
HIST_BINS: Final = 2 * HIST_MAGNITUDES
HIST_LOW_EXPONENT: Final = -32
"""Log2-magnitude histogram. Bin ``m`` of a sign holds ``2**(LOW+m-1) <= |x| < 2**(LOW+m)``: bin 0 everything
smaller, bin 63 everything larger. Bins 0..63 are positive numbers, 64..127 negative ones; zeros, NaNs
and infinities are in no bin."""
