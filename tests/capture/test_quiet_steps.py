"""Steps of a loop in which nothing is new pass by the short way, and leave what the general way leaves."""

import math
import random
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

import clew
from clew.capture.beat import Course, Ledger, SlowCourse, SlowLedger
from clew.capture.torch import gates
from clew.capture.torch.flight import Flight
from clew.capture.torch.optimizers import has_same, has_same_slowly
from clew.capture.torch.randomness import RandomStates
from clew.capture.torch.recorder import Recorder
from clew.stats.rows import KERNEL

STEPS = 200


def draw_batches():
    while True:
        yield torch.randn(16, 6)


def load_batches():
    """Yield the batches of a loader, epoch after epoch."""
    loader = torch.utils.data.DataLoader(torch.randn(16 * 30, 6), batch_size=16, shuffle=True)
    while True:
        yield from loader


def train(folder, name, *, every=40, spoil_at=None, kind="gradient", batches=draw_batches):
    """Train a small net with dropout and a schedule, validated now and then; return its recorder and its run."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 25)
    with clew.watch(model, optimizer, out=folder, name=name, every=every, status=False) as watch:
        recorder = watch._recording.session.recorder
        troubles = []
        recorder.on_trouble.append(lambda *what: troubles.append((recorder.step, *what)))
        for step, x in zip(range(STEPS), batches(), strict=False):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            if step == spoil_at:
                if kind == "gradient":
                    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
                else:
                    loss = loss * math.inf
            loss.backward()
            optimizer.step()
            schedule.step()
            if step == spoil_at:
                break
            if step == 20:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(4, 6))
                model.train()
    return recorder, troubles, clew.open_run(folder / name)


def count_general(monkeypatch):
    """Count the steps that end by the general way."""
    ends, original = [], Recorder.end_step

    def end_step(self, **kwargs):
        ends.append(self.step)
        original(self, **kwargs)

    monkeypatch.setattr(Recorder, "end_step", end_step)
    return ends


def take_gates_away(monkeypatch):
    """Have Python stand where torch calls clew, as it does without the kernel or where somebody compiles."""
    monkeypatch.setattr(gates, "KERNEL", None)


def go_generally(monkeypatch):
    """Have every step end by the general way."""
    take_gates_away(monkeypatch)
    monkeypatch.setattr(Recorder, "begin_call", lambda *_: -1, raising=False)
    monkeypatch.setattr(Recorder, "end_quietly", lambda _: False, raising=False)
    monkeypatch.setattr(Recorder, "begin_pass", lambda *_: -1, raising=False)
    monkeypatch.setattr(Flight, "end_update", lambda *_: -1, raising=False)


def numbers(run):
    kept = ("loss", "lr", "clew.recorded", "mode")
    return {
        name: list(zip(*run.scalars()[name], strict=True))
        for name in run.scalars()
        if name.split("[")[0] in kept
    }


@pytest.mark.parametrize("batches", [draw_batches, load_batches])
@pytest.mark.parametrize("with_gates", [True, False])
def test_both_ways_leave_the_same(tmp_path, monkeypatch, with_gates, batches):
    ends = count_general(monkeypatch)
    if not with_gates:
        take_gates_away(monkeypatch)
    quiet, _, run = train(tmp_path, "quiet", batches=batches)
    general_ends = len(ends)
    assert general_ends < STEPS - 50
    go_generally(monkeypatch)
    ends.clear()
    general, _, expected = train(tmp_path, "general", batches=batches)
    assert len(ends) == STEPS
    assert numbers(run) == numbers(expected)
    assert (quiet.step, quiet.ended, quiet.serial) == (general.step, general.ended, general.serial)
    assert (quiet.last_loss, quiet.lowest_loss) == (general.last_loss, general.lowest_loss)
    assert (quiet.schedule.recorded, quiet.schedule.thinned) == (
        general.schedule.recorded,
        general.schedule.thinned,
    )
    weights, others = (each.series("0.weight", "param", "l2").values for each in (run, expected))
    assert len(weights) == quiet.schedule.recorded
    assert weights.tolist() == others.tolist()


@pytest.mark.parametrize("kind", ["gradient", "loss"])
def test_a_value_that_goes_bad_in_a_quiet_step_is_seen_at_once(kind, tmp_path, monkeypatch):
    ends = count_general(monkeypatch)
    _, troubles, _ = train(tmp_path, "bad", spoil_at=191, kind=kind)
    assert {188, 189, 190} - set(ends)  # steps before it were quiet
    assert troubles[0][:2] == (191, kind)


def test_the_ledgers_agree():
    fast, slow = Ledger(), SlowLedger()
    for ledger in (fast, slow):
        ledger.share, ledger.cost, ledger.most, ledger.warmup_steps = 0.02, 0.5, 1.0, 3
        ledger.forced_until, ledger.unseen = 5, 0.002
    answers = []
    for ledger in (fast, slow):
        seen = []
        for step in range(60):
            seen.append((ledger.is_due(step), round(ledger.bank, 12)))
            ledger.account(step, 0.001 * (step % 7), 1.0 + step % 3, False)
        ledger.period = 4
        answers.append((seen, [ledger.is_due(step) for step in range(12)]))
    assert answers[0] == answers[1]
    assert {due for due, _ in answers[0][0]} == {True, False}


def test_the_ledgers_account_alike():
    answers = []
    for ledger in (Ledger(), SlowLedger()):
        ledger.share, ledger.warmup_steps, ledger.forced_until, ledger.found_until = 0.02, 3, -1, 6
        seen = []
        for step in range(6000):
            due = step % 10 != 3
            seen.append((ledger.is_due(step), due and ledger.is_probed(step)))
            ledger.account(step, 0.001 * (step % 7), 1.0 + step % 3, due)
            seen.append((ledger.recorded, ledger.thinned, ledger.since_last, ledger.probed_at))
            seen.append((round(ledger.bank, 12), round(ledger.cost, 12), round(ledger.most, 12)))
        answers.append(seen)
    assert answers[0] == answers[1]
    gaps = {later - earlier for earlier, later in pairwise(sorted({each[3] for each in answers[0][1::3]}))}
    assert {25, 200} <= gaps  # ever fewer steps are probed, up to a limit


def test_groups_are_the_same_by_identity():
    rate, held = 0.5, [1]
    group = {"lr": rate, "params": held}
    for same in (has_same, has_same_slowly):
        assert same([group], [{"lr": rate, "params": held, "other": 2}], ("lr", "params"))
        assert not same([group], [{"lr": rate, "params": [1]}], ("lr", "params"))
        assert not same([group], [], ("lr", "params"))
        assert same([{"params": held}], [{"params": held}], ("lr", "params"))


def follow_flight(folder, name, *, with_loader, has_buffers):
    """Train, drawing from every generator in turns; return what the flight recorder kept at the end of each step."""
    torch.manual_seed(1)
    norm = torch.nn.BatchNorm1d(3) if has_buffers else torch.nn.Identity()
    model = torch.nn.Sequential(norm, torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(240, 3))
    batches = torch.utils.data.DataLoader(data, batch_size=2) if with_loader else data.tensors[0].split(2)
    kept = []
    with clew.watch(model, optimizer, out=folder, name=name, every=40, status=False) as watch:
        recorder = watch._recording.session.recorder
        flight = recorder.flight
        for step, given in enumerate(batches):
            x = given[0] if with_loader else given
            optimizer.zero_grad()
            (model(x).square().mean() + random.gauss(0, 1) + np.random.rand()).backward()
            optimizer.step()
            now = RandomStates()
            now.take()
            line, _ = flight.known_frames[id(sys._getframe())]
            random_states, buffers = flight.start_state()
            has_start = random_states == now.export()
            copies = [buffers[id(buffer)].tolist() for buffer in model.buffers()]
            # With a loader they are from the moment of its batch, before the model has changed them.
            are_new = copies == [buffer.tolist() for buffer in model.buffers()]
            assert len(buffers) == 3 * has_buffers and (not has_buffers or are_new is not with_loader)
            passes = (flight.usual_passes, flight.passes)
            kept.append((step, has_start, line, passes, len(recorder.calls), flight.ended, copies))
        assert flight.step_seconds > 0
    return kept


@pytest.mark.parametrize("with_gates", [True, False])
@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("with_loader", [False, True])
def test_the_end_of_a_usual_update_keeps_what_the_general_way_keeps(
    tmp_path, monkeypatch, with_loader, has_buffers, with_gates
):
    kind = {"with_loader": with_loader, "has_buffers": has_buffers}
    if not with_gates:
        take_gates_away(monkeypatch)
    general_ends, original = [], Flight.mark_end
    monkeypatch.setattr(Flight, "mark_end", lambda self: (general_ends.append(1), original(self))[1])
    usual = follow_flight(tmp_path, "usual", **kind)
    assert len(general_ends) < len(usual) - 50
    go_generally(monkeypatch)
    assert follow_flight(tmp_path, "general", **kind) == usual
    # With a loader the step begins with its batch, after which the script draws more numbers.
    assert all(has_start is not with_loader for _, has_start, *_ in usual[1:])


def test_a_snapshot_that_is_asked_for_is_not_missed_by_usual_ends(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with clew.watch(model, optimizer, out=tmp_path, name="asked", every=40, status=False) as watch:
        flight = watch._recording.session.recorder.flight
        for step in range(90):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            if step == 70:
                assert flight.look_at > step
                flight.ask_snapshot("a test")
            optimizer.step()
    kept = [folder.name for folder in (tmp_path / "asked" / "rank0" / "snapshots").iterdir()]
    assert any(name.endswith("71") for name in kept)


def test_the_pace_is_that_of_the_shortest_step_of_late():
    for kind in (Course, SlowCourse):
        course = kind()
        course.keep_pace(0)
        assert (course.step_seconds, course.ended, course.ends) == (0.0, 0, 1)
        course.ended_at -= 5.0
        course.keep_pace(1)
        assert 5.0 <= course.step_seconds < 5.5
        course.keep_pace(2)
        short = course.step_seconds
        assert short < 1.0
        course.ended_at -= 50.0
        course.keep_pace(3)
        assert course.step_seconds == pytest.approx(1.1 * short)


@pytest.mark.skipif(KERNEL is None, reason="the kernel was not built")
def test_buffers_are_copied_as_long_as_they_are_like_their_copies():
    numbers = [torch.arange(6.0), torch.tensor(3), torch.zeros(2, 0), torch.tensor([True, False])]
    pairs = [(each, torch.empty_like(each)) for each in numbers]
    assert KERNEL.copy_buffers([]) and KERNEL.copy_buffers(pairs)
    assert all(torch.equal(*pair) for pair in pairs)
    for odd in (
        torch.arange(8.0)[::2],
        torch.zeros(5),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(2, 2),
    ):
        assert not KERNEL.copy_buffers([*pairs, (odd, torch.full((4,), 7.0)), *pairs])
    assert not KERNEL.copy_buffers([(torch.zeros(4).to_sparse(), torch.zeros(4))])
    assert not KERNEL.copy_buffers([(torch.zeros(1 << 20), torch.zeros(1 << 20))])
    with pytest.raises(TypeError, match="copy_buffers"):
        KERNEL.copy_buffers(None)


def test_buffers_of_any_kind_are_there_as_they_were(tmp_path):
    class Keeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.register_buffer("large", torch.zeros(1 << 19))
            self.register_buffer("turned", torch._neg_view(torch.randn(4)))
            self.register_buffer("growing", torch.zeros(0))

        def forward(self, x):
            self.large += 1
            self.growing = torch.cat([self.growing, x[:1, 0].detach()])
            return self.layer(x)

    model = Keeper()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with clew.watch(model, optimizer, out=tmp_path, name="kept", every=40, status=False) as watch:
        flight = watch._recording.session.recorder.flight
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
            kept = flight.start_state()[1]
            assert torch.equal(kept[id(model.large)], model.large)
            assert torch.equal(kept[id(model.turned)], model.turned)
