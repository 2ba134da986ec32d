"""Probes of a loop that goes on and on rest; what is new in it wakes them."""

import torch
from torch import nn

import clew


def train(model, optimizer, steps):
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.MSELoss()(model(x), torch.zeros(4, 2)).backward()
        optimizer.step()


def test_a_fault_that_begins_after_hundreds_of_steps_is_still_seen(tmp_path):
    torch.manual_seed(0)  # a loss that happens to leave its level early makes the probes look at other steps
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with clew.watch(out=str(tmp_path), name="run", every=50, snapshots="off") as run:
        train(model, optimizer, 306)
        recorder = run._recording.session.recorder
        resting = [recorder.on_root, recorder.on_pass]
        assert not any(resting)
        model.eval()
        train(model, optimizer, 4)
        assert all(resting)
        with torch.no_grad():
            nn.functional.mse_loss(model(torch.randn(4, 6)), torch.zeros(4, 2))
        model.train()
        train(model, optimizer, 6)
        assert not any(resting)
        torch.save({"model": model.state_dict()}, tmp_path / "weights.pt")
    opened = clew.open_run(run.path)
    assert not opened.faults()
    assert [note["step"] for note in opened.notes("step-in-eval")] == [306, 307, 308]
    assert [note["at"] for note in opened.notes("evaluation")] == [310]


def test_weights_that_were_kept_long_ago_are_known_again(tmp_path):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with clew.watch(model, optimizer, out=str(tmp_path), name="run", every=50, snapshots="off") as run:
        train(model, optimizer, 320)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, 10)
        torch.save(kept, tmp_path / "weights.pt")
    (note,) = clew.open_run(run.path).notes("stale-checkpoint")
    assert (note["problem"], note["from"], note["behind"]) == ("an earlier state", 319, 9)


def test_a_loop_that_changes_is_looked_at_again(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with clew.watch(out=str(tmp_path), name="run", budget="0.01%", snapshots="off") as run:
        train(model, optimizer, 40)
        model.append(nn.Linear(2, 2))
        train(model, optimizer, 12)
    assert not torch.nn.modules.module._global_module_registration_hooks
    opened = clew.open_run(run.path)
    assert not opened.faults()
    assert [(note["step"], note["reason"]) for note in opened.notes("changed-loop")] == [(40, "model")]
    assert {41, 42, 43, 44, 45, 46} <= set(opened.series("2", "output", "mean").steps.tolist())


def test_every_nth_step_stays_every_nth_when_a_loop_changes(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with clew.watch(out=str(tmp_path), name="run", every=10, warmup=0, snapshots="off") as run:
        train(model, optimizer, 40)
        model.append(nn.Linear(2, 2))
        train(model, optimizer, 20)
    opened = clew.open_run(run.path)
    assert opened.notes("changed-loop")
    assert opened.series("0", "output", "mean").steps.tolist() == [0, 10, 20, 30, 40, 50]


def test_probes_that_know_a_loop_rest_soon_and_hear_of_a_change(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with clew.watch(model, optimizer, out=str(tmp_path), name="run", snapshots="off") as run:
        recorder = run._recording.session.recorder
        listening = []
        for _ in range(9):
            train(model, optimizer, 1)
            listening.append(len(recorder.on_root))
        assert listening[8] <= listening[1] / 2
        assert not recorder.on_call
        for _ in range(8):
            nn.functional.mse_loss(model(torch.randn(4, 6)), torch.zeros(4, 2)).backward()
            optimizer.step()
        assert len(recorder.on_root) > listening[1] / 2
    opened = clew.open_run(run.path)
    assert not opened.faults()
    assert [note["problem"] for note in opened.notes("gradients")][:2] == ["stale", "stale"]
    assert [finding.id for finding in clew.diagnose(opened).findings] == ["O01"]


def test_probes_that_rest_look_now_and_then_without_a_reason(tmp_path):
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with clew.watch(model, optimizer, out=str(tmp_path), name="run", snapshots="off") as run:
        recorder = run._recording.session.recorder
        listening = []
        for _ in range(32):
            train(model, optimizer, 1)
            listening.append(len(recorder.on_pass))
    assert listening[10] == listening[22] < listening[24] == listening[27]
    assert listening[30] == listening[22]
