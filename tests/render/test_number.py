import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.views import number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "1"),
        (0.1, "0.1"),
        (1.23456, "1.235"),
        (-12.3456, "-12.35"),
        (12345.6, "12346"),
        (99999.4, "99999"),
        (99999.5, "1e5"),
        (123456.0, "1.235e5"),
        (0.001, "0.001"),
        (0.00123456, "0.001235"),
        (0.0001, "1e-4"),
        (1.23456e-10, "1.235e-10"),
        (9.9996, "10"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (5e-324, "4.941e-324"),
    ],
)
def test_numbers_have_four_significant_digits(value, text):
    assert number.format_number(value) == text


@given(st.floats(-1.7e308, 1.7e308))
def test_a_number_reads_back_to_four_digits(value):
    assert float(number.format_number(value)) == pytest.approx(value, rel=5.1e-4, abs=0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (4_000_000_000, "4.00 GB"),
        (10**18, "1000 PB"),
        (math.nan, "NaN"),
    ],
)
def test_sizes_are_si(value, text):
    assert number.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999_999, "999,999"),
        (1_000_000, "1.00 M"),
        (-38_597_376, "-38.6 M"),
        (999_500_000, "1.00 G"),
        (60_016_463_708_160, "60.0 T"),
        (10**19, "10000 P"),
        (math.nan, "NaN"),
        (math.inf, "inf"),
    ],
)
def test_counts_are_rounded_from_a_million_on(value, text):
    assert number.format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.5e-9, "1.50 ns"),
        (12.34e-6, "12.3 µs"),
        (0.00456, "4.56 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (123, "2 min 03 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (86399, "1 d 00 h"),
        (3 * 86400 + 4 * 3600, "3 d 04 h"),
        (-2, "-2.00 s"),
        (math.inf, "inf"),
    ],
)
def test_durations_use_the_unit_people_would(value, text):
    assert number.format_seconds(value) == text


@given(st.floats(1e-9, 1e9))
def test_no_duration_reads_a_thousand_of_a_smaller_unit(value):
    text = number.format_seconds(value)
    assert not text.startswith("1000") or " d " in text  # days have no larger unit
    assert not re.search(r"(?<![\d.])60 (s|min)", text)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.0 %"), (0.00001, "<0.1 %"), (0.031, "3.1 %"), (1.5, "150.0 %"), (math.inf, "inf")],
)
def test_shares_are_percentages(value, text):
    assert number.format_share(value) == text


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (None, "number", "-"),
        (True, "number", "yes"),
        (1234567, "integer", "1,234,567"),
        (1234567, "text", "1234567"),
        (0.5, "text", "0.5"),
        ("2026-11-15T14:25:01.123+01:00", "time", "2026-11-15 14:25:01"),
        ("yesterday", "time", "yesterday"),
        (12.34, "rate", "12.3/s"),
    ],
)
def test_a_cell_follows_its_format(value, style, text):
    assert number.format_value(value, style) == text
