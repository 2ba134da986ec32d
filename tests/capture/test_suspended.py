"""Generators of the user that wait for their next turn are found, and memory is searched only when need be."""

import sys
import types

import pytest

from clew.capture.torch import snapshot_names
from clew.capture.torch.snapshot_names import Suspended, user_frames


def count_up(start):
    while True:
        yield start
        start += 1


def make_nested():
    def inner():
        kept = 5
        yield kept
        yield kept + 1

    return inner()


@pytest.fixture
def searches(monkeypatch):
    """Count how often all memory is searched."""
    done = []
    search = snapshot_names._search
    monkeypatch.setattr(snapshot_names, "_search", lambda frames: done.append(1) or search(frames))
    return done


def find(suspended):
    found = suspended.find(user_frames(sys._getframe(1)))
    own = [frame for frame in found if frame.f_code.co_filename == __file__]
    return sorted([(frame.f_code.co_name, [*frame.f_locals.values()][-1]) for frame in own], key=str)


def test_a_waiting_generator_is_found_and_followed_without_another_search(searches):
    suspended = Suspended()
    for number in count_up(7):
        assert find(suspended) == [("count_up", number)]
        if number == 12:
            break
    assert len(searches) == 1


def test_generators_that_begin_and_end_are_noticed(searches):
    suspended = Suspended()
    assert find(suspended) == []
    first, second = count_up(1), count_up(20)
    next(first), next(second)
    assert find(suspended) == [("count_up", 1), ("count_up", 20)]
    del first
    assert find(suspended) == [("count_up", 20)]
    second.close()
    assert find(suspended) == []
    first = count_up(3)
    next(first)
    assert find(suspended) == [("count_up", 3)]
    before = len(searches)
    assert find(suspended) == [("count_up", 3)]
    assert len(searches) == before


def test_one_that_takes_the_place_of_another_is_noticed():
    suspended = Suspended()
    waiting = count_up(1)
    next(waiting)
    assert find(suspended) == [("count_up", 1)]
    waiting = count_up(2)
    next(waiting)
    assert find(suspended) == [("count_up", 2)]


def test_one_of_a_function_inside_another_is_found():
    suspended = Suspended()
    assert find(suspended) == []
    waiting = make_nested()
    next(waiting)
    assert find(suspended) == [("inner", 5)]


class Source:
    @staticmethod
    def alone(start):
        yield start
        yield start + 1

    class Inner:
        @classmethod
        def of_kind(cls):
            place = 4
            yield place
            yield place + 1


def test_ones_by_any_name_that_begin_after_the_first_search_are_found():
    suspended = Suspended()
    assert find(suspended) == []
    alone = Source.alone(30)
    next(alone)
    assert find(suspended) == [("alone", 30)]
    inner = Source.Inner.of_kind()
    next(inner)
    assert [name for name, _ in find(suspended)] == ["alone", "of_kind"]
    expression = (number for number in [8, 9])
    next(expression)
    assert [name for name, _ in find(suspended)] == ["<genexpr>", "alone", "of_kind"]


def test_one_that_is_used_up_but_kept_hides_no_other():
    suspended = Suspended()
    first, second = Source.alone(1), Source.alone(1)
    next(first), next(second)
    assert len(find(suspended)) == 2
    used = [list(first), list(second)]
    assert find(suspended) == []
    other = Source.alone(3)
    next(other)
    assert find(suspended) == [("alone", 3)]
    assert used == [[2], [2]]


def test_a_running_generator_is_none_that_waits():
    suspended = Suspended()

    def look():
        yield find(suspended)

    assert list(look()) == [[]]


def test_what_an_imported_module_yields_is_found(tmp_path):
    module = types.ModuleType("data_of_the_user")
    module.__file__ = str(tmp_path / "data_of_the_user.py")
    exec(compile("def stream():\n    place = 3\n    yield place\n", module.__file__, "exec"), vars(module))
    scope = {"data": module, "Suspended": Suspended, "user_frames": user_frames, "sys": sys}
    program = (
        "waiting = data.stream()\nnext(waiting)\nfound = Suspended().find(user_frames(sys._getframe()))\n"
    )
    exec(compile(program, str(tmp_path / "train.py"), "exec"), scope)
    assert "stream" in [frame.f_code.co_name for frame in scope["found"]]


def test_a_program_that_never_yields_is_not_searched(tmp_path, searches):
    scope = {"sys": sys}
    exec(compile("frame = sys._getframe()", str(tmp_path / "train.py"), "exec"), scope)
    assert Suspended().find([scope["frame"]]) == []
    assert searches == []
