"""CLEW_CHECKS=0: every tap returns its value, and nothing is loaded; and what importing costs."""

import inspect
import os
import subprocess
import sys

import pytest

import clew
from clew.capture.torch import check_off


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


OFF = """
import sys, clew
x = object()
assert clew.check.finite(x, "logits") is x
assert clew.check.in_range(x, 0, 1, "x", warn=True) is x
assert clew.check.shape(x, "B T") is x
assert clew.check.probabilities(x, dim=-1) is x
assert clew.check.that(x, show=[x]) is x
assert clew.print(x, "after norm", first_n=3, every=100, when=lambda t: 1 / 0, summarize=5) is x
assert clew.tap(x, lambda t: 1 / 0) is x
with clew.checks(x, {"zzz": "finit"}) as on:
    assert on.sites == ()
clew.on("*", lambda t: 1 / 0).remove()
clew.check.new_step()
try:
    clew.check.finite(x, nmae="x")
except TypeError:
    print("still wrong")
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("switch", ["0", "off", "false", "no"])
def test_switched_off_taps_return_their_value_and_load_nothing(switch):
    code, out, err = run(OFF, CLEW_CHECKS=switch)
    assert (code, out.split("\n"), err) == (0, ["still wrong", "False", ""], "")


def test_a_switch_that_is_neither_is_refused():
    code, _, err = run("import clew; clew.check", CLEW_CHECKS="maybe")
    assert code == 1
    assert "CLEW_CHECKS: 'maybe' is neither yes nor no" in err
    assert "write 0 or 1" in err


def test_the_switch_is_no_setting_of_a_run(monkeypatch):
    from clew.capture.settings import load_settings

    load_settings(environment={"CLEW_CHECKS": "0"})


def test_on_and_off_take_the_same_arguments():
    names = [name for name in clew.check.__all__ if name != "new_step"]
    assert len(names) == 19
    pairs = [(getattr(clew.check, name), getattr(check_off, name)) for name in names]
    pairs += [(clew.print, check_off.print_value), (clew.tap, check_off.tap)]
    pairs += [(clew.checks, check_off.checks), (clew.on, check_off.on)]
    for on, off in pairs:
        assert describe(on) == describe(off), on.__name__


def describe(function):
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.default, each.kind) for each in parameters]


def test_a_star_import_leaves_print_alone():
    assert "print" not in clew.__all__
    assert "print" in dir(clew)


def test_using_taps_does_not_load_the_compiler():
    code, out, err = run(
        "import torch, clew, sys\n"
        "clew.check.finite(clew.print(torch.ones(1)))\n"
        "assert 'torch._dynamo' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    assert (code, err) == (0, "")
    assert out.startswith("float32[1]")
