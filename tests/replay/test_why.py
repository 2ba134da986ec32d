"""The very line: each script goes wrong in one known way, marked by a comment, and ``why`` must name that line."""

import textwrap

import pytest
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing

import clew
from clew.store.verdicts import read_verdicts

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
"""

LOOP = """
def train(model, batches, criterion=None, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y) if criterion else out.mean()
        loss.backward()
        optimizer.step()
good = lambda: (torch.randn(6, 4), torch.randint(0, 3, (6,)))
zero = lambda: (torch.zeros(6, 4), torch.randint(0, 3, (6,)))
"""

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
    def forward(self, x):
        h = self.fc(x)
        {line}  # HERE
        return h
train(Net(), [good(), {bad}])
"""

CASES = {
    "log of zero": ("h = torch.log(h.abs())", "zero()", "forward", "log"),
    "sqrt gradient at zero": ("h = torch.sqrt(h.square())", "zero()", "backward", "sqrt"),
    "norm by hand at zero": ("h = h.square().sum(1).sqrt()", "zero()", "backward", "sqrt"),
    "zero times infinity": (
        "h = h * torch.tensor(float('inf') if (x == 0).all() else 1.0)", "zero()", "forward", "mul"),
    "softmax of a masked row": (
        "h = torch.softmax(h.masked_fill(x[:, :1] == 0, float('-inf')), -1)", "zero()", "forward", "softmax"),
    "std of one element": ("h = h[:, :1].std(dim=1) if (x == 0).all() else h", "zero()", "forward", "std"),
    "exp overflow": ("h = torch.exp(h)", "(torch.full((6, 4), 1e4), zero()[1])", "forward", "exp"),
    "half overflow": ("h = (h.half() * 300).float()", "(torch.full((6, 4), 1e3), zero()[1])", "forward", "mul"),
    "acos gradient": ("h = torch.acos(torch.tanh(h))", "(torch.full((6, 4), 1e3), zero()[1])", "backward", "acos"),
    "asin gradient": ("h = torch.asin(torch.tanh(h))", "(torch.full((6, 4), 1e3), zero()[1])", "backward", "asin"),
    "where does not protect": (
        "h = torch.where(h.abs() > 0, torch.log(h.abs()), torch.zeros(()))", "zero()", "backward", "log"),
    "power of a negative": ("h = (h.abs() - 2e3 * (x.abs().max() > 1e2)) ** 0.5",
                            "(torch.full((6, 4), 5e2), zero()[1])", "forward", "pow"),
    "division by a zero norm": ("h = h / h.norm(dim=1, keepdim=True)", "zero()", "forward", "div"),
}  # fmt: skip


def explain(script, tmp_path, **settings):
    """Run a script under a watch and return the verdict and the number of the marked line."""
    file = tmp_path / "script.py"
    file.write_text(script)
    with clew.watch(out=str(tmp_path / "runs"), name="run", **settings) as run:
        exec(compile(script, str(file), "exec"), {"__name__": "__main__"})
    lines = script.splitlines()
    marked = next((number for number, line in enumerate(lines, 1) if "# HERE" in line), None)
    verdicts = read_verdicts(run.path / "rank0")
    assert len(verdicts) == 1, "one explanation, once"
    return verdicts[0], marked


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", CASES)
def test_the_line_inside_a_model(name, tmp_path):
    line, bad, phase, op = CASES[name]
    verdict, marked = explain(HEAD + LOOP + MODEL.format(line=line, bad=bad), tmp_path)
    assert verdict["found"]
    assert (verdict["source"]["line"], verdict["phase"], verdict["op"]) == (marked, phase, op)
    assert verdict["site"] == "(model)"
    assert verdict["replay"] == "identical"
    assert verdict["step"] == 1
    assert verdict["hint"]


def test_all_targets_ignored(tmp_path):
    script = (
        HEAD
        + LOOP
        + """
def criterion(out, y):
    return F.cross_entropy(out, y)  # HERE
train(nn.Linear(4, 3), [good(), (good()[0], torch.full((6,), -100))], criterion)
"""
    )
    verdict, marked = explain(script, tmp_path)
    assert (verdict["source"]["line"], verdict["op"]) == (marked, "nll_loss")


def test_nan_in_the_data_names_the_batch(tmp_path):
    script = HEAD + LOOP + "bad = good(); bad[0][4, 2] = float('nan')\ntrain(nn.Linear(4, 3), [good(), bad])"
    verdict, _ = explain(script, tmp_path)
    assert verdict["phase"] == "data"
    assert "batch" in verdict["hint"]


def test_a_bad_weight_from_before_is_told_apart(tmp_path):
    script = (
        HEAD
        + LOOP
        + """
model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
with torch.no_grad():
    model[0].weight[3] = float("nan")
train(model, [(torch.tensor([[1, 2, 4]]), 0), (torch.tensor([[1, 3, 4]]), 0)])
"""
    )
    verdict, _ = explain(script, tmp_path)
    assert (verdict["phase"], verdict["site"], verdict["step"]) == ("parameter", "0.weight", 0)


def test_adam_without_eps_is_the_optimizer(tmp_path):
    script = (
        HEAD
        + """
model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
for step in range(3):
    optimizer.zero_grad()
    model(torch.zeros(2, 4)).sum().mul(0 if step == 1 else 1).backward()
    optimizer.step()  # HERE
"""
    )
    verdict, marked = explain(script, tmp_path)
    assert (verdict["phase"], verdict["source"]["line"]) == ("optimizer", marked)


def test_a_wrong_custom_function(tmp_path):
    script = (
        HEAD
        + LOOP
        + """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x * x * 2  # HERE
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
    def forward(self, x):
        return Scale.apply(self.fc(x))
train(Net(), [good(), zero()])
"""
    )
    verdict, marked = explain(script, tmp_path)
    assert (verdict["phase"], verdict["source"]["line"]) == ("backward", marked)


SHAPES = {
    "a function called by the loop": """
def loss_of(model, x):
    return torch.log(model(x).abs()).mean()  # HERE
def step(model, optimizer, x):
    loss = loss_of(model, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model = nn.Linear(4, 3, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.randn(6, 4), torch.zeros(6, 4)]:
    step(model, optimizer, x)
""",
    "a trainer class with random data": """
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.model.parameters())
    def batch(self, step):
        return torch.randn(6, 4) * (step < 2)
    def fit(self):
        step = 0
        while True:
            x = self.batch(step)
            out = self.model(x)
            self.optimizer.zero_grad()
            loss = out.abs().log().mean()  # HERE
            loss.backward()
            self.optimizer.step()
            step += 1
            if step > 3:
                return
Trainer().fit()
""",
    "a closure": """
model = nn.Linear(4, 3, bias=False)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
for x in [torch.randn(6, 4), torch.zeros(6, 4)]:
    def closure():
        optimizer.zero_grad()
        loss = torch.log(model(x).abs()).mean()  # HERE
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "a loader fetched by hand": """
data = torch.cat([torch.randn(6, 4), torch.zeros(6, 4)])
loader = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=6))
model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    (x,) = next(loader)
    optimizer.zero_grad()
    loss = model(x).abs().log().mean()  # HERE
    loss.backward()
    optimizer.step()
""",
    "accumulation": """
model = nn.Linear(4, 3, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batches in [[1, 1], [1, 0]]:
    for factor in batches:
        loss = model(torch.randn(6, 4) * factor).abs().log().mean() / 2  # HERE
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a batch norm with statistics": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        return self.fc(torch.log(self.norm(x).abs() * (x.abs() > 0)))  # HERE
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in [torch.randn(6, 4), torch.zeros(6, 4)]:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize("shape", SHAPES)
def test_loops_of_every_shape(shape, tmp_path):
    verdict, marked = explain(HEAD + SHAPES[shape], tmp_path)
    assert verdict["found"], verdict["notes"]
    assert verdict["phase"] == "forward"
    assert verdict["source"]["line"] == marked
    assert verdict["replay"] == "identical", verdict["notes"]


def test_masks_and_dead_branches_are_not_blamed(tmp_path):
    script = (
        HEAD
        + LOOP
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=False)
    def forward(self, x):
        h = self.fc(x)
        dead = torch.log(torch.zeros(3))
        mask = torch.full((3,), float("-inf")).masked_fill(torch.tensor([True, True, False]), 0.0)
        a = torch.softmax(h + mask, -1)
        return torch.sqrt(a[:, 2] * x.sum())  # HERE
train(Net(), [(torch.ones(6, 4), 0)])
"""
    )
    verdict, marked = explain(script, tmp_path)
    assert (verdict["source"]["line"], verdict["op"], verdict["phase"]) == (marked, "sqrt", "backward")


def test_training_goes_on_as_if_nothing_was_asked(tmp_path):
    script = (
        HEAD
        + LOOP
        + """
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.3))
def criterion(out, y):
    return (out.sum() * 0 + torch.tensor(0.0)).log() if y is None else F.cross_entropy(out, y)
train(model, [good(), (good()[0], None), good()], criterion)
import hashlib
RESULT = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())).hexdigest()
RANDOM = torch.rand(1).item()
"""
    )
    plain = {"__name__": "__main__"}
    exec(compile(script, "plain.py", "exec"), plain)
    watched = {"__name__": "__main__"}
    with clew.watch(out=str(tmp_path / "runs"), name="run") as run:
        exec(compile(textwrap.dedent(script), "watched.py", "exec"), watched)
    assert (watched["RESULT"], watched["RANDOM"]) == (plain["RESULT"], plain["RANDOM"])
    assert read_verdicts(run.path / "rank0")
