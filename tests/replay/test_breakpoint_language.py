"""What can be said about where to stop, and what is answered to what cannot."""

import pytest

from clew.errors import UsageError
from clew.replay.breakpoint import parse_breakpoint


@pytest.mark.parametrize(
    ("text", "kind", "target", "phase", "moment"),
    [
        ("layers.3:forward", "site", "layers.3", "forward", "after"),
        ("layers.3", "site", "layers.3", "forward", "after"),
        ("layers.3 before", "site", "layers.3", "forward", "before"),
        ("layers.3:forward before", "site", "layers.3", "forward", "before"),
        ("layers.3:forward:before", "site", "layers.3", "forward", "before"),
        ("op:softmax:before", "op", "softmax", "", "before"),
        ("layers.*:backward", "site", "layers.*", "backward", "before"),
        ("layers.*:backward after", "site", "layers.*", "backward", "after"),
        ("fc.weight:update", "site", "fc.weight", "update", "after"),
        ("op:softmax before", "op", "softmax", "", "before"),
        ("step:12", "step", "step", "", "before"),
        ("train.py:42", "line", "train.py", "", "before"),
        ("src/model.py:7", "line", "src/model.py", "", "before"),
    ],
)
def test_every_form_is_understood(text, kind, target, phase, moment):
    for written in (text, f"  {text}  if   out.max() > 1 "):
        point = parse_breakpoint(written)
        assert (point.kind, point.target, point.phase, point.moment) == (kind, target, phase, moment)
        assert (point.condition is None) == ("if" not in written)


def test_patterns_fit_names():
    assert parse_breakpoint("layers.*:forward").matches("layers.3")
    assert not parse_breakpoint("layers.*:forward").matches("head")
    assert parse_breakpoint("op:add").matches("add_")
    assert parse_breakpoint("model.py:3").matches("/home/me/model.py")
    assert not parse_breakpoint("model.py:3").matches("/home/me/my_model.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no place"),
        ("train.py", "which line of 'train.py'?"),
        ("op", "which operation?"),
        ("step if x", "which step?"),
        ("layers.3:foward", "unknown phase 'foward', did you mean 'forward'?"),
        ("layers.3:forward later", "'later' is neither before nor after"),
        ("layers.3:forward befor", "did you mean 'before'?"),
        ("step:soon", "'soon' is no step"),
        ("op:", "names no operation"),
        ("train.py:12 after", "a line has no phase"),
        ("fc:forward if", "'fc:forward if': 'if' is neither before nor after"),
        ("fc:forward if out >", "no Python expression: invalid syntax"),
        ("fc:forward if x = 3", "no Python expression"),
        ("{a:forward", "a brace without its partner"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(UsageError) as raised:
        parse_breakpoint(text)
    assert said in raised.value.what
    assert raised.value.next_step


def test_the_place_of_a_syntax_error_is_shown():
    with pytest.raises(UsageError) as raised:
        parse_breakpoint("fc:forward if out.abs( > 3")
    assert ">>>" in raised.value.where
