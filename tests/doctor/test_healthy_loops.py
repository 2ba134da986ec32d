"""Silence on healthy code: nothing of weight is found in trainings that look strange and are right."""

import pytest
from healthy_loops import LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_found(judge, name):
    judged = judge(LOOPS[name], budget="3%")
    assert judged.ids == [], judged
