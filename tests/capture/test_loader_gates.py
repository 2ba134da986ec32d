"""Batches of loaders pass their gates without a line of clew's Python, and leave what the general way leaves."""

import contextlib
import gc
import random
import sys
import threading
import weakref
from collections import namedtuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.capture.test_gates import OWN, QUIET, frames_of_clew, is_gate, recorder_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    dataloader,
)

import clew
from clew.capture.torch import batches as batches_of
from clew.capture.torch import gates
from clew.capture.torch.leaves import list_leaves
from clew.capture.torch.randomness import RandomStates
from clew.store.snapshots import list_batches, list_snapshots

STEPS = 170
FIRST = 60
"""The step of the oldest snapshot: what steps before were given goes when it likes."""
ROWS, SIZE = 40, 4
"""Ten batches an epoch."""

Pair = namedtuple("Pair", "x y")

pytestmark = [
    pytest.mark.skipif(gates.KERNEL is None, reason="the kernel was not built"),
    pytest.mark.usefixtures("nothing_was_compiled"),
]


class Augmented(Dataset):
    """Draws from every generator for each sample; ``between`` may happen meanwhile."""

    def __init__(self):
        self.rows = torch.randn(ROWS, 6)
        self.between = lambda: None

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        self.between()
        noise = torch.rand(6) + random.gauss(0, 1) + float(np.random.rand())
        return {"x": self.rows[index] + 0.1 * noise, "name": f"sample {index}", "y": index % 3}


class Nested(Augmented):
    """Takes its samples from another loader."""

    def __getitem__(self, index):
        return next(iter(DataLoader(self.rows[index : index + 1], batch_size=None))), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        return ((torch.rand(6), number % 3) for number in range(ROWS))


def repeat(*args, **kwargs):
    loader = DataLoader(*args, **kwargs)
    while True:
        yield from loader


def rows():
    return TensorDataset(torch.randn(ROWS, 6), torch.arange(ROWS) % 3)


def fetch_ahead():
    """Yield batches as frameworks do: the next one is fetched before the step begins."""
    source = repeat(rows(), batch_size=SIZE, shuffle=True)
    ahead = next(source)
    while True:
        now, ahead = ahead, next(source)
        yield now


def change_in_place():
    for number, (x, y) in enumerate(repeat(rows(), batch_size=SIZE)):
        if number > QUIET + 35:
            x.add_(1)
        yield x, y


def validate_between():
    """Yield batches, with a pass over another loader after every tenth."""
    other = DataLoader(TensorDataset(torch.randn(5 * SIZE, 6)), batch_size=SIZE)
    for number, batch in enumerate(repeat(rows(), batch_size=SIZE, shuffle=True)):
        yield batch
        if number % 10 == 9:
            list(other)


def take_turns():
    yield from (
        batch
        for both in zip(
            repeat(rows(), batch_size=SIZE), repeat(Augmented(), batch_size=SIZE, shuffle=True), strict=True
        )
        for batch in both
    )


SOURCES = {
    "tensors": lambda: repeat(rows(), batch_size=SIZE, shuffle=True),
    "augmented": lambda: repeat(Augmented(), batch_size=SIZE, shuffle=True),
    "sampler of batches": lambda: repeat(
        rows(), sampler=BatchSampler(RandomSampler(range(ROWS)), SIZE, drop_last=False), batch_size=None
    ),
    "single samples": lambda: (
        (x[None], torch.tensor([y]))
        for x, y in repeat(list(zip(torch.randn(ROWS, 6), [1] * ROWS, strict=True)), batch_size=None)
    ),
    "workers": lambda: repeat(Augmented(), batch_size=SIZE, num_workers=2),
    "persistent workers": lambda: repeat(rows(), batch_size=SIZE, num_workers=2, persistent_workers=True),
    "stream": lambda: repeat(Stream(), batch_size=SIZE),
    "nested": lambda: repeat(Nested(), batch_size=SIZE),
    "named tuples": lambda: repeat([Pair(row, 1) for row in torch.randn(ROWS, 6)], batch_size=SIZE),
    "arrays": lambda: (
        (torch.from_numpy(x), torch.from_numpy(y))
        for x, y in repeat(
            rows(),
            batch_size=SIZE,
            collate_fn=lambda given: tuple(np.stack(each) for each in zip(*given, strict=True)),
        )
    ),
    "slices": lambda: ((x[1:], y[1:]) for x, y in repeat(rows(), batch_size=SIZE)),
    "fetched ahead": fetch_ahead,
    "changed in place": change_in_place,
    "validated": validate_between,
    "in turns": take_turns,
}


class Training:
    """A net with dropout, which draws random numbers, and a norm, which has buffers."""

    def __init__(self, source, *, gathers=1):
        torch.manual_seed(4)
        random.seed(4)
        np.random.seed(4)
        norm, drop = torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), norm, drop, torch.nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.batches = SOURCES[source]() if isinstance(source, str) else source
        self.gathers = gathers

    def step(self):
        self.optimizer.zero_grad()
        for _ in range(self.gathers):
            batch = next(self.batches)
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            if y.numel() < 2:
                x, y = x.expand(2, -1), y.expand(2)
            loss = torch.nn.functional.cross_entropy(self.model(x.float()), y)
            loss.backward()
        self.optimizer.step()
        return loss.item()

    def watch(self, folder, name="run", **settings):
        settings = {"every": 40, "snapshots": "every:60", **settings}
        return clew.watch(self.model, self.optimizer, out=folder, name=name, status=False, **settings)


def count_kept(monkeypatch):
    """Count the batches that are kept by the general way."""
    kept, original = [], batches_of.BatchLens._note
    monkeypatch.setattr(
        batches_of.BatchLens, "_note", lambda self, *given: (kept.append(1), original(self, *given))[1]
    )
    return kept


def read_disk(folder):
    """Return what the run has of batches and snapshots, whichever files that is in."""
    run = clew.open_run(folder)
    steps, tensors, snapshots = {}, {}, []
    for file in list_batches(folder / "rank0"):
        steps.update((step["step"], step) for step in file.read_steps() if step["step"] >= FIRST)
        found = load_file(file.path).items()
        tensors.update(
            (name, each.numpy().tobytes()) for name, each in found if int(name.split(".")[0]) >= FIRST
        )
    for snapshot in list_snapshots(folder / "rank0"):
        state = {key: each for key, each in snapshot.read_state().items() if key not in ("names", "left_out")}
        files = {
            path.name: load_file(path) for path in snapshot.path.glob("*.safetensors") if path.stem != "names"
        }
        words = {(file, name): each.numpy().tobytes() for file in files for name, each in files[file].items()}
        snapshots.append((snapshot.step, repr(state), words))
    batches = {
        name: list(map(repr, run.batches()[name]))
        for name in ("step", "leaf", "fingerprint", "loader", "position", "indices")
    }
    assert not run.faults()
    return steps, tensors, snapshots, batches


def train(folder, name, source, **options):
    training = Training(source, **options)
    with training.watch(folder, name) as watch:
        losses = [training.step() for _ in range(STEPS)]
        recorder, was_clones = recorder_of(watch), recorder_of(watch).flight.snapshots.clones
        assert not recorder.fetching
        assert not recorder.guard.take()
        start, buffers = recorder.flight.start_state()
        ended = (recorder.step, recorder.flight.ended, recorder.flight.ends, recorder.flight.has_loader)
    after = RandomStates()
    after.take()
    weights = [each.tolist() for each in training.model.state_dict().values()]
    state = (
        losses,
        weights,
        after.export(),
        start,
        [each.tolist() for each in buffers.values()],
        ended,
        was_clones,
    )
    return state, read_disk(folder / name)


EVERY_TIME = {"named tuples", "arrays"}
"""What is not plain is kept by the general way."""


@pytest.mark.parametrize("source", list(SOURCES))
def test_both_ways_keep_the_same(tmp_path, monkeypatch, source):
    kept = count_kept(monkeypatch)
    state, disk = train(tmp_path, "gates", source)
    few = len(kept)
    monkeypatch.setattr(gates, "KERNEL", None)
    kept.clear()
    expected_state, expected_disk = train(tmp_path, "none", source)
    assert state == expected_state
    assert disk == expected_disk
    assert len(disk[0]) > 50
    assert few == len(kept) if source in EVERY_TIME else few < len(kept) - 20
    weights = Training(source)
    assert [weights.step() for _ in range(STEPS)] == state[0]  # as without clew


def test_both_ways_keep_the_same_of_steps_that_gather(tmp_path, monkeypatch):
    kept = count_kept(monkeypatch)
    found = train(tmp_path, "gates", "augmented", gathers=3)
    assert len(kept) < 3 * STEPS - 60
    monkeypatch.setattr(gates, "KERNEL", None)
    assert found == train(tmp_path, "none", "augmented", gathers=3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [rows, Augmented])
def test_a_quiet_step_over_a_loader_runs_no_python_of_clew(tmp_path, data, workers):
    training = Training(repeat(data(), batch_size=SIZE, num_workers=workers))
    with training.watch(tmp_path):
        seen = [frames_of_clew(training.step) for _ in range(STEPS)]
    assert sum(not each for each in seen[QUIET:]) >= 30


def test_gates_at_loaders_come_and_go(tmp_path):
    def places():
        kind = dataloader._BaseDataLoaderIter
        return vars(kind)["__next__"], vars(kind)["_next_index"]

    before, training = places(), Training("tensors")
    with training.watch(tmp_path) as watch:
        for _ in range(30):
            training.step()
        assert all(map(is_gate, places()))
        iterator = iter(DataLoader(rows()))
        assert dataloader._BaseDataLoaderIter.__next__.__name__ == "__next__"
        assert len(iterator.__next__()) == len(next(iterator)) == len(type(iterator).__next__(iterator)) == 2
        watch._recording.session._patches.uncover()
        assert not any(map(is_gate, places()))
        training.step()
    assert places() == before


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, StopIteration])
def test_an_exception_inside_a_dataset_goes_on_as_it_is(tmp_path, kind):
    data = Augmented()
    training, quiet = Training(iter(())), 0

    def fail():
        raise kind("mine")

    def batches(number):
        for step, batch in enumerate(repeat(data, batch_size=SIZE)):
            if step == number:
                return
            yield batch

    with training.watch(tmp_path) as watch:
        recorder = recorder_of(watch)
        training.batches = batches(QUIET)
        for _ in range(QUIET):
            training.step()
        for _ in range(4):
            iterator = iter(DataLoader(data, batch_size=SIZE))
            training.batches = iterator
            training.step()
            training.step()
            data.between = fail
            phase = recorder.clock.phase
            with pytest.raises(kind, match="mine") as caught:
                next(iterator)
            assert recorder.clock.phase == phase
            assert not recorder.fetching
            quiet += not any(str(entry.path).startswith(OWN) for entry in caught.traceback)
            data.between = lambda: None
            training.step()
        assert not recorder.guard.take()
    assert quiet


@pytest.mark.parametrize("when", ["on_exhausted", "on_end"])
def test_ctrl_c_while_clew_is_at_work_reaches_the_user(tmp_path, when):
    rows = torch.randn(SIZE * QUIET, 6)
    training = Training(iter(DataLoader(TensorDataset(rows, torch.ones(len(rows)).long()), batch_size=SIZE)))

    def interrupt(*_):
        raise KeyboardInterrupt

    with training.watch(tmp_path) as watch:
        recorder = recorder_of(watch)
        for _ in range(QUIET):
            training.step()
        phase = recorder.clock.phase
        getattr(recorder, when).append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(training.batches)
        getattr(recorder, when).remove(interrupt)
        assert not recorder.fetching
        assert recorder.clock.phase == phase


def test_modes_of_the_user_hear_what_they_hear_without_clew(tmp_path):
    class Listen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            heard.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    found = []
    for is_watched in (False, True):
        heard = []
        training = Training("tensors")
        with training.watch(tmp_path) if is_watched else contextlib.nullcontext():
            for _ in range(QUIET):
                training.step()
            with Listen():
                for _ in range(3):
                    training.step()
        found.append(heard)
    assert found[0] == found[1]


def test_another_thread_takes_batches_of_its_own(tmp_path):
    training, taken = Training("tensors"), []

    def take():
        taken.extend(DataLoader(rows(), batch_size=SIZE))

    with training.watch(tmp_path) as watch:
        losses = [training.step() for _ in range(QUIET)]
        position = recorder_of(watch).flight.last_iterator
        torch.manual_seed(1)
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        assert recorder_of(watch).flight.last_iterator is position
        assert not any(each is recorder_of(watch).flight.last_batch for each in taken)
    assert len(taken) == ROWS // SIZE
    plain = Training("tensors")
    assert losses == [plain.step() for _ in range(QUIET)]


def test_a_probe_that_listens_is_told_of_every_batch(tmp_path):
    training, told = Training("tensors"), []
    with training.watch(tmp_path) as watch:
        for _ in range(QUIET):
            training.step()
        recorder = recorder_of(watch)
        recorder.on_batch.append(lambda iterator, batch: told.append((iterator, batch)))
        for _ in range(12):
            training.step()
        assert len(told) == 12
        assert told[-1][1] is recorder.flight.last_batch
        assert told[-1][0] is recorder.flight.last_iterator()


def test_a_new_dataset_wakes_the_probes_that_rest(tmp_path):
    training = Training("tensors")
    with training.watch(tmp_path) as watch:
        recorder = recorder_of(watch)
        for _ in range(QUIET):
            training.step()
        assert not recorder.on_batch
        list(DataLoader(rows(), batch_size=SIZE))
        assert recorder.on_batch


def test_nothing_of_a_batch_or_an_iterator_stays(tmp_path):
    """Over thousands of batches neither objects nor memory grow, and what is let go is gone."""
    training = Training("augmented")
    with training.watch(tmp_path, keep_batches=8, snapshots="every:100000") as watch:
        recorder = recorder_of(watch)
        for _ in range(QUIET):
            training.step()
        iterator = iter(DataLoader(Augmented(), batch_size=SIZE))
        batches, training.batches = training.batches, iterator
        references = []
        for _ in range(5):
            training.step()
            references += [weakref.ref(leaf) for leaf in list_leaves(recorder.flight.last_batch)]
        references.append(weakref.ref(iterator))
        training.batches = batches
        del iterator
        counts = []
        for _ in range(5):
            for _ in range(400):
                training.step()
            gc.collect()
            counts.append((len(gc.get_objects()), sys.getrefcount(None)))
        assert not any(reference() is not None for reference in references)
        assert len(recorder.flight.snapshots.entries) <= 8
        # What waits for the writer comes and goes by hundreds: one that stayed of each batch would be 1,200 at least.
        for before, after in zip(map(min, *counts[:2]), map(min, *counts[3:]), strict=True):
            assert after - before < 800


def test_a_finished_recording_of_a_loader_is_let_go(tmp_path):
    training = Training("augmented")
    with training.watch(tmp_path) as watch:
        for _ in range(QUIET + 5):
            training.step()
        kept = weakref.ref(recorder_of(watch)), weakref.ref(recorder_of(watch).flight.snapshots)
    del watch
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_a_fault_of_ours_is_told_and_training_goes_on(tmp_path):
    training = Training("tensors")
    with training.watch(tmp_path) as watch:
        losses = [training.step() for _ in range(QUIET)]
        recorder_of(watch).flight.snapshots.ahead = None
        losses += [training.step() for _ in range(30)]
        assert not recorder_of(watch).fetching
    plain = Training("tensors")
    assert losses == [plain.step() for _ in range(len(losses))]
    assert clew.open_run(tmp_path / "run").faults()


def test_buffers_that_are_not_plain_memory_are_copied_by_the_general_way(tmp_path, monkeypatch):
    training = Training("tensors")
    training.model.register_buffer("spread", torch.randn(6, 4).t())
    kept = count_kept(monkeypatch)
    with training.watch(tmp_path) as watch:
        for _ in range(STEPS):
            training.step()
        copies = recorder_of(watch).flight.start_state()[1]
        assert torch.equal(copies[id(training.model.spread)], training.model.spread)
    assert len(kept) == STEPS


def test_a_buffer_of_another_shape_is_copied_anew(tmp_path):
    training = Training("tensors")
    training.model.register_buffer("queue", torch.zeros(2))
    with training.watch(tmp_path) as watch:
        for step in range(STEPS):
            if step == QUIET + 10:
                training.model.queue.resize_(2, 3).fill_(7.0)
            training.step()
            copies = recorder_of(watch).flight.start_state()[1]
            if step > QUIET + 10:
                assert torch.equal(copies[id(training.model.queue)], torch.full((2, 3), 7.0))


def test_batches_are_not_kept_where_nobody_wants_them(tmp_path):
    for name, settings in (("none", {"keep_batches": 0}), ("off", {"snapshots": "off"})):
        training = Training("augmented")
        with training.watch(tmp_path, name, **settings) as watch:
            seen = [frames_of_clew(training.step) for _ in range(STEPS)]
            snapshots = recorder_of(watch).flight.snapshots
            assert snapshots is None or not snapshots.entries
        assert sum(not each for each in seen[QUIET:]) >= 20
        assert not list_batches(tmp_path / name / "rank0")
