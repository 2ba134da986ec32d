"""clew preflight on scripts: healthy ones, one with a fault, and what is left behind."""

import json
import textwrap

import pytest

MLP = """
import torch
from torch import nn
torch.manual_seed(0)
inputs = torch.randn(512, 8)
labels = inputs[:, :4].argmax(1)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(inputs, labels), batch_size=32, shuffle={shuffle}
)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
loss_of = nn.CrossEntropyLoss()
open("config.txt", "w").close()
try:
    for epoch in range(20):
        for index, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of({output}, y)
            loss.backward()
            optimizer.step()
            print("loss", loss.item())
            if index > 2:
                torch.save(model.state_dict(), "step.pt")
finally:
    open("last.txt", "w").close()
"""

CNN = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 49, 5)

    def forward(self, x):
        return self.last(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))

def train(model, loader, optimizer, scaler):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        scaler.scale(F.nll_loss(F.log_softmax(model(data), 1), target)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

def main():
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(96, 1, 16, 16), torch.randint(0, 5, (96,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        train(model, loader, optimizer, scaler)
        schedule.step()
        torch.save(model.state_dict(), "cnn.pt")

if __name__ == "__main__":
    main()
"""

LANGUAGE = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
text = torch.randint(0, 30, (2000,))

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, 32), nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 30)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.body(x, mask=mask, is_causal=True))

model = Language()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
step = 0
while step < 500:
    starts = torch.randint(0, len(text) - 17, (8,)).tolist()
    x = torch.stack([text[i : i + 16] for i in starts])
    y = torch.stack([text[i + 1 : i + 17] for i in starts])
    loss = F.cross_entropy(model(x).view(-1, 30), y.view(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
"""

LIGHTNING = """
import warnings
warnings.simplefilter("ignore")
import lightning, torch
from torch import nn

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

torch.manual_seed(0)
x = torch.randn(256, 8)
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Model(), loader)
"""


@pytest.fixture
def rehearse(zygote, tmp_path):
    """Return a function that rehearses a script and returns its exit code and report."""

    def run(text, *options):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        words = ["preflight", "--json", "--skip", "compile", *options, "train.py"]
        done = zygote.clew(tmp_path, *words)
        assert done.stdout, done.stderr
        return done.code, json.loads(done.stdout), done.stderr

    return run


def statuses(report):
    return {check["name"]: check["status"] for check in report["checks"]}


def test_a_healthy_script_is_stopped_and_leaves_nothing(rehearse, tmp_path):
    code, report, told = rehearse(MLP.format(shuffle=True, output="model(x)"))
    assert code == 0
    assert report["ready"]
    assert set(statuses(report).values()) == {"ok", "not checked"}
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["cost"]["evidence"]["steps"] == 320
    assert "mixed" in by_name["labels"]["text"]
    assert report["written"] == ["config.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.txt", "train.py"]
    assert told.count("loss") == 2  # what the script prints, up to its third step
    assert report["seconds"] > 0


MIXED = """
class Mixed(nn.Sequential):
    def forward(self, x):
        return super().forward(x - x.mean(0))
model = Mixed("""


def test_a_fault_fails_its_check_and_no_other(rehearse):
    text = MLP.format(shuffle=True, output="model(x)").replace("\nmodel = nn.Sequential(", MIXED)
    code, report, _ = rehearse(text, "--only", "samples,labels,gradients")
    assert code == 2
    assert statuses(report) == {"gradients": "ok", "samples": "failed", "labels": "ok"}


@pytest.mark.parametrize(
    ("script", "also"), [(CNN, {"train-eval"}), (LANGUAGE, {"future"}), (LIGHTNING, {"overfit"})]
)
def test_healthy_scripts(rehearse, tmp_path, script, also):
    code, report, told = rehearse(script)
    assert code == 0, report
    found = statuses(report)
    assert set(found.values()) == {"ok", "not checked"}, report
    wanted = {
        "one-batch",
        "initial-loss",
        "gradients",
        "overfit",
        "samples",
        "batch-size",
        "repeat",
        "resume",
    }
    assert {name for name, status in found.items() if status == "ok"} >= wanted | also
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], told


def test_a_script_that_fails_at_once(rehearse):
    code, report, told = rehearse(MLP.format(shuffle=True, output="model(x[:, :4])"))
    assert code == 2
    assert statuses(report)["one-batch"] == "failed"
    assert "RuntimeError" in report["checks"][0]["text"]
    assert "Traceback" in told


def test_a_script_without_a_training(rehearse):
    code, report, _ = rehearse("import torch\nprint(torch.ones(2))")
    assert code == 2
    assert report["checks"][0]["text"] == "the script ended without a step of an optimizer"
