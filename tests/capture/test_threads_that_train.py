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


def count_steps(path):
    """Return how many steps a run counts, everywhere it is said."""
    run = clew.open_run(path)
    (listed,) = clew.list_runs(path.parent)
    assert listed.steps == len(run.ended_steps)
    return len(run.ended_steps)


def test_of_threads_that_train_at_once_the_first_is_recorded(tmp_path):
    meet, pairs = threading.Barrier(3), [make() for _ in range(3)]

    def work(model, optimizer):
        for _ in range(6):
            meet.wait()
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    with clew.watch(out=str(tmp_path), name="run", budget="off", snapshots="every:2") as run:
        workers = [threading.Thread(target=work, args=pair) for pair in pairs]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert count_steps(run.path) == 6
    opened = clew.open_run(run.path)
    assert not opened.faults()
    assert [note for note in opened.info.notes if "several threads train at once" in note]
    assert len(opened.find("*", kind="grad")) == 4  # of one model


def test_threads_one_after_the_other_are_one_training_after_the_other(tmp_path):
    with clew.watch(out=str(tmp_path), name="run") as run:
        for _ in range(2):
            worker = threading.Thread(target=train, args=make(), kwargs={"clears": True})
            worker.start()
            worker.join()
        model, optimizer = make()
        train(model, optimizer, clears=True)
    assert count_steps(run.path) == 36


def test_steps_of_one_loop_may_run_in_any_thread_of_a_pool(tmp_path):
    model, optimizer = make()
    turns = [threading.Event() for _ in range(7)]

    def work(first):
        for turn in range(first, 6, 2):
            turns[turn].wait(10)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            turns[turn + 1].set()

    with clew.watch(out=str(tmp_path), name="run") as run:
        workers = [threading.Thread(target=work, args=(first,)) for first in range(2)]
        for worker in workers:
            worker.start()
        turns[0].set()
        turns[3].wait(10)
        with torch.no_grad():
            model(torch.ones(1, 4))  # from outside, perhaps in the middle of a step
        for worker in workers:
            worker.join()
    assert count_steps(run.path) == 6
