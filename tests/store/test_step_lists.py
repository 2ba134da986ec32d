"""The steps of a part survive being written as runs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.store.part import read_steps, write_steps


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 200), max_size=60))
def test_any_steps_come_back(steps):
    wanted = np.array(sorted(steps), np.int64)
    assert np.array_equal(read_steps(write_steps(wanted)), wanted)


def test_regular_steps_are_one_run():
    assert write_steps(np.arange(0, 50_000, 5)) == "0:49996:5"
    assert write_steps(np.arange(7, 9)) == "7:9:1"
    assert write_steps(np.array([3])) == "3:4:1"
    assert write_steps(np.zeros(0, np.int64)) == ""


def test_thinned_steps_keep_their_first_dense_stretch():
    assert write_steps(np.array([*range(20), 30, 40, 50, 51])) == "0:20:1,30:51:10,51:52:1"
