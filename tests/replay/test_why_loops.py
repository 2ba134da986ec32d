"""Why in loops of unusual shape: gathered gradients, bare tensors, torch.func, counters, and loops in other modules."""

import json

import pytest

from zygote import Job

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
"""

SCRIPTS = {
    "a recurrent layer, whose workspace has elements that nobody wrote": HEAD
    + """
rnn, out = nn.LSTM(2, 8, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*rnn.parameters(), *out.parameters()], lr=1e-3)
for turn in range(26):
    rate = out(rnn(torch.randn(4, 5, 2))[0]) * (1e4 if turn == 24 else 1)
    loss = torch.exp(rate).mean()  # here
    optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
    "gradients gathered over turns": HEAD
    + """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for turn in range(80):
    out = model(torch.randn(6, 4))
    loss = torch.log(out * 0 if turn == 73 else out.exp()).mean() / 3  # here
    loss.backward()
    if turn % 3 == 2: optimizer.step(); optimizer.zero_grad()
""",
    "gradients gathered over batches, in a step recorded in full": HEAD
    + """
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for turn, (x,) in enumerate(DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4, shuffle=True)):
    out = model(x)
    loss = torch.log(out * 0 if turn == 8 else out.exp()).mean() / 3  # here
    loss.backward()
    if turn % 3 == 2: optimizer.step(); optimizer.zero_grad()
""",
    "gradients gathered in a loop inside the step, batches from a generator": HEAD
    + """
from torch.utils.data import DataLoader, TensorDataset
def cycle(loader):
    while True: yield from loader
batches = cycle(DataLoader(TensorDataset(torch.rand(24, 4)), batch_size=6, shuffle=True))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for turn in range(26):
    for part in range(3):
        x, = next(batches)
        out = model(x)
        loss = torch.log(out * 0 if turn == 24 and part == 1 else out.exp()).mean() / 3  # here
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
""",
    "bare tensors updated by hand": HEAD
    + """
weights = {"w": torch.randn(4, 8).requires_grad_(), "v": torch.randn(8, 1).requires_grad_()}
def update(weights):
    with torch.no_grad():
        for weight in weights.values():
            weight -= 0.02 * weight.grad / weight.grad.norm()  # here
            weight.grad = None
for turn in range(9):
    x = torch.randn(6, 4)
    loss = (x @ weights["w"] @ weights["v"]).square().mean() * (0 if turn == 6 else 1)
    loss.backward(); update(weights)
""",
    "torch.func, which needs no backward": HEAD
    + """
from torch.func import functional_call, grad
model = nn.Linear(4, 1)
weights = {name: value.detach() for name, value in model.named_parameters()}
for turn in range(6):
    x = torch.randn(6, 4) * (0 if turn == 3 else 1)
    gradients = grad(lambda w: functional_call(model, w, (x,)).square().mean())(weights)
    for name, value in gradients.items():
        weights[name] = weights[name] - 0.1 * value / value.norm()  # here
""",
    "a counter that the model keeps": HEAD
    + """
class Counting(nn.Module):
    def __init__(self): super().__init__(); self.inner, self.calls = nn.Linear(4, 1), 0
    def forward(self, x):
        self.calls += 1
        return torch.sqrt(self.inner(x).square() * (self.calls != 7))  # here
model = Counting(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for turn in range(9):
    loss = model(torch.randn(6, 4)).mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
""",
}

LATER = ("a counter that the model keeps",)
"""What a copy of the process cannot tell is left to a process of its own, here to the one that is asked."""

EXPECTED = {
    "a recurrent layer, whose workspace has elements that nobody wrote": (24, "forward", "exp", "identical"),
    "gradients gathered over turns": (24, "forward", "log", "identical"),
    "gradients gathered over batches, in a step recorded in full": (2, "forward", "log", "identical"),
    "gradients gathered in a loop inside the step, batches from a generator": (
        24,
        "forward",
        "log",
        "identical",
    ),
    "bare tensors updated by hand": (6, "optimizer", "div", "close"),
    "torch.func, which needs no backward": (3, "forward", "div", "identical"),
    "a counter that the model keeps": (6, "backward", "sqrt", "identical"),
}


@pytest.fixture(scope="module")
def verdicts(zygote, tmp_path_factory):
    """Record all scripts at once and ask why of each."""
    folders = {name: tmp_path_factory.mktemp("why") for name in SCRIPTS}
    for name, folder in folders.items():
        (folder / "train.py").write_text(SCRIPTS[name])
    words = ["-m", "clew", "run", "--no-status", "--name", "run", "train.py"]
    later = [*words[:3], "--explain", "off", *words[3:]]
    ended = zygote.run(*(Job(folder, later if name in LATER else words) for name, folder in folders.items()))
    assert [each.code for each in ended] == [0] * len(folders), ended
    asked = zygote.run(
        *(Job(folder, ["-m", "clew", "why", "runs/run", "--json"]) for folder in folders.values())
    )
    return {name: json.loads(each.stdout) for name, each in zip(folders, asked, strict=True)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_line_is_named(name, verdicts):
    told = verdicts[name]
    assert (told["step"], told["phase"], told["op"], told["replay"]) == EXPECTED[name], told
    assert told["source"]["text"].endswith("# here")
