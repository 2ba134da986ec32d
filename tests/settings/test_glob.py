import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.errors import UsageError
from clew.model.glob import compile_globs, split_patterns


@pytest.mark.parametrize(
    ("patterns", "name", "fits"),
    [
        (["*"], "", True),
        (["layers.*"], "layers.0.fc.weight", True),
        (["layers.*"], "layers", False),
        (["layers.?"], "layers.3", True),
        (["layers.?"], "layers.13", False),
        (["fc{1,2}.weight"], "fc2.weight", True),
        (["fc{1,2}.weight"], "fc3.weight", False),
        (["{a,b{1,2}}.w"], "b2.w", True),
        (["out[0]"], "out[0]", True),
        (["out[0]"], "out0", False),
        (["a.b"], "axb", False),
        (["*", "!*.bias"], "fc.bias", False),
        (["!*.bias"], "fc.weight", True),
        (["!*.bias", "!fc.*"], "fc.weight", False),
        (["fc*", "conv*", "!*.bias"], "conv1", True),
        (["Fc"], "fc", False),
        (["a"], "a\n", False),
    ],
)
def test_a_pattern_fits_what_it_says(patterns, name, fits):
    assert compile_globs(patterns)(name) is fits


@given(st.text("ab.*?", max_size=8), st.text("ab.", max_size=8))
def test_without_braces_it_agrees_with_fnmatch(pattern, name):
    assert compile_globs([pattern])(name) == fnmatch.fnmatchcase(name, pattern)


def test_commas_inside_braces_do_not_split():
    assert split_patterns(" a.{b,c} , !d,, e ") == ("a.{b,c}", "!d", "e")


@pytest.mark.parametrize("pattern", ["{a,b", "a}", "}{", "a{b}}"])
def test_a_lonely_brace_is_an_error_that_shows_the_pattern(pattern):
    with pytest.raises(UsageError, match="has a brace without its partner") as caught:
        compile_globs([pattern])
    assert f"'{pattern}'" in caught.value.what
    assert caught.value.next_step == "write alternatives as {a,b}"
