"""Silence on healthy code: nothing of weight is found in trainings that look strange and are right."""

import healthy_data  # noqa: F401 - each adds its loops to the list
import healthy_games  # noqa: F401
import healthy_steps  # noqa: F401
import pytest
from healthy_loops import LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_found(judge, name):
    judged = judge(LOOPS[name], budget="3%")
    assert judged.ids == [], judged
