import sys
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - loading it replaces functions of torch, and an optimizer loads it when it first steps

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def fresh_taps():
    """Every test begins without bound names and without anything told already."""
    import clew
    from clew.capture.torch import check_report, taps_compiled

    clew.check.new_step()
    told = set(check_report._told), set(taps_compiled._told)
    check_report._told.clear()
    taps_compiled._told.clear()
    yield
    check_report._told.update(told[0])
    taps_compiled._told.update(told[1])
    clew.check.new_step()
