"""``clew.profile_function``: the time of Python functions."""

from __future__ import annotations

import cProfile
import io
import subprocess
import sys

import pytest

import clew
from clew.errors import UsageError


@pytest.fixture(autouse=True)
def keep_the_end_of_the_tests_quiet(monkeypatch):
    monkeypatch.setattr("atexit.register", lambda function: function)


def busy(count):
    return sum(number * number for number in range(count))


def test_what_a_function_calls_is_listed_with_its_line():
    @clew.profile_function
    def work(count):
        return busy(count) + busy(count)

    assert work(100) == 2 * busy(100)
    rows = {row.name: row for row in work.profiler.rows()}
    assert rows["busy"].calls == 2
    assert rows["busy"].source.endswith(f"test_profile_function.py:{busy.__code__.co_firstlineno}")
    assert rows["work"].total >= rows["busy"].total
    assert work.__name__ == "work"


def test_a_condition_chooses_the_calls():
    @clew.profile_function(when=lambda count: count > 10)
    def work(count):
        return busy(count)

    for count in (1, 20, 5, 30):
        work(count)
    assert work.profiler.calls == 2


def test_it_prints_after_so_many_calls_and_begins_anew(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()

    @clew.profile_function(every=2, sort="calls", limit=3, file=out)
    def work():
        return busy(10)

    work()
    assert out.getvalue() == ""
    work()
    head, titles, *lines = out.getvalue().splitlines()
    assert head.endswith("work: 2 calls")
    assert titles.split() == ["total", "own", "calls", "function", "line"]
    assert max(map(len, lines)) <= 80
    assert lines[-1].strip() == "and 1 more"
    assert work.profiler.calls == 0


def test_nested_functions_are_counted_once():
    @clew.profile_function
    def inner():
        return busy(10)

    @clew.profile_function
    def outer():
        return inner()

    outer()
    assert inner.profiler.calls == 0
    assert "inner" in {row.name for row in outer.profiler.rows()}


def test_an_exception_passes_and_the_profiler_is_off_again():
    @clew.profile_function
    def work(fail):
        if fail:
            raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        work(True)
    work(False)
    assert work.profiler.calls == 2
    assert sys.getprofile() is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="profilers replace each other before Python 3.12")
def test_somebody_elses_profiler_is_left_alone(capsys):
    @clew.profile_function
    def work():
        return busy(10)

    with cProfile.Profile():
        assert work() == busy(10)
    assert work.profiler.calls == 0
    assert "another profiler is on" in capsys.readouterr().err


def test_the_rest_is_printed_when_the_process_ends():
    script = "import clew\n@clew.profile_function\ndef work(): return sorted([2, 1])\nwork()\nprint('done')"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("done\nwork: 1 call\n")
    assert "sorted" in shown


def test_an_unknown_order_is_refused():
    with pytest.raises(UsageError, match="sort='tim' is no order"):
        clew.profile_function(sort="tim")
