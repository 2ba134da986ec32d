"""Every loop runs plain and under clew: whatever it prints, computes and leaves is the same bit for bit."""

from __future__ import annotations

import re

import pytest
from loop import Loop, Zygote, read_loops

LOOPS = read_loops()
DIGESTS = 9


@pytest.fixture(scope="session")
def zygote():
    server = Zygote()
    yield server
    server.close()


def pytest_generate_tests(metafunc):
    if "loop" in metafunc.fixturenames:
        wanted = [
            loop for loop in LOOPS if "watch" in loop.promises or "watch" not in metafunc.function.__name__
        ]
        metafunc.parametrize("loop", wanted, ids=[loop.name for loop in wanted])


def test_plain(loop: Loop, zygote, tmp_path):
    """The loops themselves are repeatable: two plain runs agree, so that a difference is clew's."""
    skip_where_missing(loop)
    jobs = [(name, [str(loop.path)], {}) for name in ("first", "second")]
    first, second = zygote.run(tmp_path, jobs, fork="process" not in loop.promises)
    assert first.code == 0, first.stderr
    assert len(re.findall(r"^digest ", first.stdout, re.MULTILINE)) >= DIGESTS
    assert len(re.findall(r"^loss ", first.stdout, re.MULTILINE)) >= 3
    assert first.stdout == second.stdout


def skip_where_missing(loop: Loop) -> None:
    if loop.missing:
        pytest.skip(f"{loop.name} needs {', '.join(loop.missing)}")
