"""Steps known as functions: ``@clew.step``, Lightning's, Hugging Face's; and a process instead of a fork."""

import gc
import importlib.util
import json
import sys

import pytest
import torch
import torch._dynamo  # wraps torch.manual_seed when first imported, which is not of our doing

import clew
from clew.api.replay import execute_again
from clew.cli import main
from clew.replay.process import run_in_child
from clew.replay.reenter import make_call
from clew.store.verdicts import read_verdicts

MARKED = """
import torch, clew
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter([torch.randn(6, 4), torch.randn(6, 4), torch.zeros(6, 4)])
@clew.step
def step(x):
    noise = torch.rand(6, 1)
    optimizer.zero_grad()
    loss = torch.log(model(x).abs() * x.abs().sum(1, keepdim=True) * noise).mean()  # HERE
    loss.backward()
    optimizer.step()
    return loss
while True:
    try:
        step(next(batches))
    except StopIteration:
        break
"""

LIGHTNING = """
import logging, warnings, lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    def training_step(self, batch, index):
        scale = 0.0 if (batch[0] == 0).all() else 1.0
        return torch.log(self.net(batch[0]).abs() * scale).mean()  # HERE
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
torch.manual_seed(0)
data = torch.randn(48, 4); data[36:40] = 0
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Task(), DataLoader(TensorDataset(data), batch_size=4))
"""

HUGGING_FACE = """
import tempfile, warnings, torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments
warnings.filterwarnings("ignore")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 3), nn.Dropout(0.2)
    def forward(self, x, labels=None):
        out = self.drop(self.fc(x))
        h = out.exp() * (0.0 if (x == 0).all() else 1.0)
        return {"loss": -torch.log(h).mean(), "logits": out}  # HERE
torch.manual_seed(0)
data = [{"x": torch.zeros(4) if 36 <= i < 40 else torch.randn(4), "labels": i % 3} for i in range(48)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, max_steps=12, per_device_train_batch_size=4, report_to=[], use_cpu=True,
                                  disable_tqdm=True, save_strategy="no", seed=1, train_sampling_strategy="sequential")
    trainer = Trainer(Net(), arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
"""


def record(script, folder, *options):
    (folder / "train.py").write_text(script)
    words = ["run", "--no-status", "--no-doctor", "--out", str(folder / "runs"), "--name", "run", *options]

    def act(child):
        child.answer({"code": main([*words, str(folder / "train.py")])})

    assert run_in_child(act) == {"code": 0}
    return clew.open_run(folder / "runs" / "run")


def line_of(script):
    return next(number for number, line in enumerate(script.splitlines(), 1) if "# HERE" in line)


def test_a_marked_function_is_called_again(tmp_path):
    run = record(MARKED, tmp_path)
    (verdict,) = run.verdicts()
    assert (verdict["step"], verdict["way"], verdict["replay"]) == (2, "step function", "identical")
    assert (verdict["source"]["line"], verdict["op"]) == (line_of(MARKED), "log")


def test_a_mark_without_a_recording_does_nothing():
    @clew.step
    def add(a, *, b):
        """Add."""
        return a + b

    assert (add(1, b=2), add.__name__, add.__doc__) == (3, "add", "Add.")


def test_a_mark_changes_no_number(tmp_path):
    def train(mark):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        optimizer = torch.optim.Adam(model.parameters())

        @mark
        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(4):
            step(torch.randn(3, 4))
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = train(lambda function: function)
    with clew.watch(out=str(tmp_path), name="run"):
        watched = train(clew.step)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert len(clew.open_run(tmp_path / "run").steps) == 4


@pytest.mark.parametrize(
    ("script", "needs"),
    [(LIGHTNING, "lightning"), (HUGGING_FACE, "transformers")],
    ids=["lightning", "transformers"],
)
def test_real_trainers(script, needs, tmp_path):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    run = record(script, tmp_path, "--snapshots", "every:3")
    (verdict,) = run.verdicts()
    assert (verdict["found"], verdict["step"], verdict["op"]) == (True, 9, "log"), verdict["notes"]
    assert verdict["source"]["line"] == line_of(script)
    assert verdict["replay"] in ("identical", "close")
    again = execute_again(run, 7)
    assert (again.exactness, again.way) == ("identical", "snapshot"), again


def test_a_process_afterwards_instead_of_a_fork(tmp_path, capfd):
    run = record(MARKED, tmp_path, "--explain", "process", "--snapshots", "every:1")
    (verdict,) = read_verdicts(run.path / "rank0")
    assert (verdict["source"]["line"], verdict["replay"]) == (line_of(MARKED), "identical")
    assert any("in a process of its own" in note for note in verdict["notes"])
    del capfd


def test_nothing_is_explained_when_that_is_off_until_somebody_asks(tmp_path, capsys):
    run = record(MARKED, tmp_path, "--explain", "off")
    assert run.verdicts() == []
    assert main(["why", str(run.path), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["step"], verdict["source"]["line"]) == (2, line_of(MARKED))
    assert len(read_verdicts(run.path / "rank0")) == 1


def test_functions_are_found_after_the_collector_was_frozen():
    """Trainings freeze what they have loaded to spare the collector, which then knows no referrers."""

    class Trainer:
        def step(self, x, *rest, scale=1):
            return make_call(sys._getframe()), x * scale

    def inner(x):
        return make_call(sys._getframe()), x

    gc.freeze()
    again, first = Trainer().step(3, scale=2)
    assert again()[1] == first == 6
    again, first = inner(4)
    assert again()[1] == first == 4
