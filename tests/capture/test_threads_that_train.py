"""Which thread trains: probes follow the one that does, wherever the model was made, and none where several do."""

import threading

import torch

import clew


def train(model, optimizer, *, clears=False):
    """Train a few steps; without clearing the gradients that is a fault the doctor knows."""
    for _ in range(12):
        x = torch.randn(8, 4)
        if clears:
            optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


def make():
    """Return a small model and its optimizer, made in the present thread."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), 0.05)


def test_a_model_made_here_and_trained_in_one_thread_is_looked_at(tmp_path):
    with clew.watch(out=str(tmp_path), name="run") as run:
        worker = threading.Thread(target=train, args=make())
        worker.start()
        worker.join()
    assert [finding.id for finding in clew.diagnose(run.path).findings] == ["O01"]


def test_trainings_in_several_threads_are_not_judged_as_one(tmp_path):
    with clew.watch(out=str(tmp_path), name="run") as run:
        for _ in range(2):
            worker = threading.Thread(target=train, args=make(), kwargs={"clears": True})
            worker.start()
            worker.join()
    assert not clew.diagnose(run.path).findings
