"""A step as a timeline: every operation with its values, forwards and backwards, within a bound of memory."""

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn

from clew.api.shell import make_lonely_recorder
from clew.replay.debugger import Debugger, split_command
from clew.replay.rehearsal import Rehearsal
from clew.replay.timeline import TimelineLens
from clew.replay.travel import Travel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        h = self.fc(x)
        scale = 2
        h = h * scale
        h.add_(1)
        return self.norm(h)


def make_step(model, x, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        out = model(x)
        loss = options.get("loss", lambda out: out.square().mean() * 3)(out)
        loss.backward()
        optimizer.step()

    return step


def record(step, **settings):
    recorder = make_lonely_recorder()
    rehearsal = Rehearsal(recorder.registry, on_symptom=lambda _: None, adopts=True)
    lens = TimelineLens(recorder, rehearsal, **settings)
    lens.begin()
    rehearsal.run(step)
    assert rehearsal.error is None
    return lens.end()


@pytest.fixture
def timeline():
    torch.manual_seed(0)
    return record(make_step(Net(), torch.randn(5, 4)))


@pytest.fixture
def debugger(timeline):
    return Debugger(Travel(timeline))


def ask(debugger, *lines):
    reply = None
    for line in lines:
        reply = debugger.execute(line).to_json()
    return reply


def value(debugger, text):
    """Return what an expression gives at the place, as text."""
    reply = ask(debugger, text)
    assert reply["kind"] == "value", reply
    return reply["values"][0].get("text")


def find(timeline, op, phase="forward"):
    return next(each for each in timeline.operations if each.op == op and each.phase == phase)


# ------------------------------------------------------------------------ the timeline


def test_all_phases_are_there_in_order_with_their_lines(timeline):
    phases = [each.phase for each in timeline.operations]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]
    linear = find(timeline, "linear")
    assert (linear.site, linear.line.text) == ("fc", "h = self.fc(x)")
    assert timeline.path_of(linear) == ["(Net)", "fc"]
    grown = find(timeline, "mul", "backward")
    assert timeline.operations[grown.forward].op == "mul"


def test_values_are_those_of_their_moment(timeline):
    """In-place operations leave what was there before them, and what came after."""
    added = find(timeline, "add_")
    before, after = timeline.vault.value(added.inputs[0]), timeline.vault.value(added.outputs[0])
    assert torch.equal(before + 1, after)
    weight = next(held for held in find(timeline, "t").inputs if held.role == "parameter fc.weight")
    updates = [each for each in timeline.operations if each.phase == "optimizer"]
    new = [held for each in updates for held in each.outputs if held.shape == (3, 4)]
    assert new, "the update of the weight is part of the step"
    assert not torch.equal(timeline.vault.value(weight), timeline.vault.value(new[-1]))


def test_names_of_the_line_are_those_of_the_moment(timeline):
    travel = Travel(timeline)
    debugger = Debugger(travel)
    travel.at = find(timeline, "add_").index
    assert value(debugger, "scale") == "2"
    assert value(debugger, "bool((h == out).all())") == "True", "it has been executed, in place"
    travel.at = find(timeline, "mul").index
    assert value(debugger, "bool((h * 2 == out).all())") == "True"
    ask(debugger, "up")
    assert value(debugger, "x.shape") == "torch.Size([5, 4])"


def test_memory_is_bounded_and_what_is_gone_says_so():
    timeline = record(
        make_step(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(256, 64)), limit_bytes=200_000
    )
    assert timeline.vault.held_bytes <= 200_000
    assert timeline.vault.dropped
    debugger = Debugger(Travel(timeline))
    ask(debugger, f"goto {find(timeline, 'linear').index}")
    reply = ask(debugger, "out.max()")
    assert "was not kept: the values of the step take more than 0.0002 GB" in reply["what"]
    assert "--memory" in reply["next"]
    assert "not kept" in ask(debugger, "stats out")["what"]


def test_a_window_keeps_the_values_it_is_asked_for():
    timeline = record(make_step(nn.Linear(4, 3), torch.randn(5, 4)), window=(1, 2))
    kept = [
        each.index for each in timeline.operations if each.outputs and timeline.vault.has(each.outputs[0])
    ]
    assert 1 in kept
    assert len(kept) < len(timeline.operations) / 2


def test_the_same_content_is_kept_once(timeline):
    held = [held for each in timeline.operations for held in (*each.inputs, *each.outputs)]
    assert timeline.vault.held_bytes < sum(each.bytes for each in held) / 2


# ------------------------------------------------------------------------ moving


def test_forwards_and_backwards(debugger):
    world = debugger.world
    ask(debugger, "step 3")
    assert world.at == 3
    ask(debugger, "back 2")
    assert world.at == 1
    ask(debugger, "")
    assert world.at == 0, "an empty line repeats the last move"
    assert "first operation" in ask(debugger, "goto start", "back")["what"]
    assert "last operation" in ask(debugger, "goto end", "step")["what"]


def test_next_steps_over_modules_and_finish_leaves_them(debugger, timeline):
    world = debugger.world
    first = find(timeline, "linear")
    ask(debugger, f"goto {first.index}", "finish")
    assert world.operation.index >= timeline.calls[first.call].last
    world.at = find(timeline, "mul").index
    depth = world.operation.depth
    ask(debugger, "next")
    assert world.operation.depth <= depth


def test_goto_by_site_operation_and_phase(debugger):
    assert ask(debugger, "goto norm")["site"] == "norm"
    assert "mul (forward)" in ask(debugger, "goto mul")["title"]
    assert ask(debugger, "goto backward")["phase"] == "backward"
    assert "mul (forward)" in ask(debugger, "goto loss")["title"]
    assert "no operation of 'nowhere'" in ask(debugger, "goto nowhere")["what"]
    assert "nothing bad" in ask(debugger, "goto bad")["what"]
    assert "operations 0 to" in ask(debugger, "goto 99999")["what"]
    assert ask(debugger, "goto nrom")["next"] == "did you mean 'norm'?"
    assert "nothing in this step is there; did you mean 'norm'?" in ask(debugger, "break nrom")["text"]


def test_going_further_than_there_is_ends_at_the_edge(debugger):
    assert ask(debugger, "goto 3", "back 1000")["title"].startswith("0 of ")
    assert ask(debugger, "back 2")["what"] == "this is the first operation of the step"


def test_a_name_q_is_not_taken_for_quit(debugger):
    assert ask(debugger, "q = 3", "q")["what"] == "'q' is a name here, and short for quit"
    assert ask(debugger, "print q")["values"][0]["text"] == "3"
    assert debugger.execute("quit").resume == "quit"


def test_a_value_is_told_before_what_was_typed_is_undone(debugger):
    ask(debugger, "goto mul")
    before = ask(debugger, "out")["values"][0]["facts"]["stats"]["max"]
    assert ask(debugger, "out.zero_()")["values"][0]["facts"]["stats"]["max"] == 0
    assert ask(debugger, "out")["values"][0]["facts"]["stats"]["max"] == before


def test_breakpoints_with_conditions_stop_where_they_hold(debugger):
    ask(debugger, "break fc:forward")
    assert ask(debugger, "continue")["site"] == "fc"
    ask(debugger, "break off 1", "break op:mul if out.max() > 1e9", "break norm:backward")
    reply = ask(debugger, "continue")
    assert (reply["phase"], reply["notes"][0]) == ("backward", "stopped by norm:backward")
    assert ask(debugger, "break")["breakpoints"] == ["op:mul if out.max() > 1e9", "norm:backward"]
    ask(debugger, "break off 2", "break off 1", "break fc.weight:update")
    assert ask(debugger, "c")["phase"] == "optimizer"
    assert ask(debugger, "break off 1", "c")["ended"]


def test_a_watched_expression_stops_where_it_changes(debugger):
    ask(debugger, "watch site")
    reply = ask(debugger, "continue")
    assert reply["site"] != "fc"
    assert reply["notes"][0].startswith("site changed from 'fc' to ")
    assert "is no Python" in ask(debugger, "watch out..")["what"]


def test_where_a_bad_value_began():
    step = make_step(nn.Linear(4, 3), torch.zeros(5, 4), loss=lambda out: (out - out).log().mean())
    timeline = record(step)
    debugger = Debugger(Travel(timeline))
    reply = ask(debugger, "goto bad")
    assert "log (forward)" in reply["title"]
    assert "here it began" in reply["notes"][-1]


# ------------------------------------------------------------------------ looking


def test_looking_at_values(debugger, tmp_path):
    ask(debugger, "goto mul")
    reply = ask(debugger, "stats")
    assert reply["rows"][0]["stats"]["count"] == 15
    reply = ask(debugger, "plot out")
    assert sum(each["count"] for each in reply["bins"]) == reply["count"] == 15
    ask(debugger, f"save out {tmp_path}/out.npy")
    assert np.load(tmp_path / "out.npy").shape == (5, 3)
    assert "wrote args" in ask(debugger, f"save args {tmp_path}/args.safetensors")["text"]
    assert "end the name with" in ask(debugger, "save out values.txt")["next"]
    assert ask(debugger, "queue 1")["operations"][0]["op"] == "mul"
    assert ask(debugger, "where")["modules"] == ["(Net)"]


def test_what_is_typed_changes_no_kept_value(debugger):
    ask(debugger, "goto mul")
    before = value(debugger, "float(out.sum())")
    ask(debugger, "out.zero_()")
    assert value(debugger, "float(out.sum())") == before
    ask(debugger, "mine = out.sum() * 0", "step")
    assert value(debugger, "abs(float(mine))") == "0.0"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("step", "step"), ("step 3", "step"), ("step == 3", ""), ("stats.max > 1", ""), ("stats out", "stats"),
        ("print out", "print"), ("print(out)", ""), ("next(iter(x))", ""), ("p -out", "print"), ("s - 1", ""),
        ("h", ""), ("q", "quit"), ("!step", ""), ("break a:forward if x", "break"), ("out", ""), ("b = 3", ""),
    ],
)  # fmt: skip
def test_commands_are_told_from_python(line, command):
    assert split_command(line)[0] == command


def test_errors_are_answers(debugger):
    assert ask(debugger, "1 / 0")["what"] == "ZeroDivisionError: division by zero"
    assert ask(debugger, "ouT")["next"] == "did you mean 'out'?"
    assert "no command 'stp'" in ask(debugger, "help stp")["what"]
    assert "terminal" in ask(debugger, "shell")["what"]
    assert ask(debugger, "print(3)")["printed"] == "3\n"
    assert ask(debugger, "")["kind"] == "nothing"
    assert len(ask(debugger, "?")["commands"]) > 15


def test_completion_knows_commands_names_and_attributes(debugger):
    ask(debugger, "goto mul")
    assert "goto" in debugger.complete("go")
    assert "scale" in debugger.complete("sc")
    assert "out.shape" in debugger.complete("out.sh")
    assert debugger.complete("nobody.x") == []
