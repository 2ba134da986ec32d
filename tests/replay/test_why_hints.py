"""What ``why`` says beside the line: which sample, which elements, what to change, and which way led there."""

import importlib.util

import torch

import clew
from clew.store.verdicts import read_verdicts

HEAD = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
"""

TRAINER = """
import torch

class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(self, batches):
        for batch in batches:
            self.training_step(dict(batch))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def training_step(self, inputs):
        loss = self.compute_loss(inputs)
        self.do_backward(loss)

    def do_backward(self, loss):
        (loss / 1).backward()
"""


def explain(script, tmp_path, **names):
    """Run a script under a watch and return the verdict and the number of the marked line."""
    file = tmp_path / "script.py"
    file.write_text(HEAD + script)
    with clew.watch(out=str(tmp_path / "runs"), name="run") as run:
        exec(compile(HEAD + script, str(file), "exec"), {"__name__": "__main__", **names})
    lines = (HEAD + script).splitlines()
    marked = next((number for number, line in enumerate(lines, 1) if "# HERE" in line), None)
    (verdict,) = read_verdicts(run.path / "rank0")
    return verdict, marked


def load_library(tmp_path):
    """Return a trainer that lies where installed packages do: its loop is not the user's."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "some_trainer.py").write_text(TRAINER)
    spec = importlib.util.spec_from_file_location("some_trainer", folder / "some_trainer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_batch_taken_apart_by_the_users_loss_is_taken_from_the_trainers_loop(tmp_path):
    script = """
class Mine(Trainer):
    def compute_loss(self, inputs):
        weight = inputs.pop("weight")
        error = (self.model(inputs["x"]) - 1).square().mean(1)
        return (error * weight).sum() / weight.sum()  # HERE
batches = [{"x": torch.randn(4, 3), "weight": torch.full((4,), float(i != 2))} for i in range(4)]
Mine(nn.Linear(3, 2)).train(batches)
"""
    verdict, marked = explain(script, tmp_path, Trainer=load_library(tmp_path).Trainer)
    assert verdict["found"], verdict["notes"]
    assert (verdict["step"], verdict["phase"], verdict["op"]) == (2, "forward", "div")
    assert verdict["source"]["line"] == marked
    assert verdict["way"] == "loop body of train"
    assert verdict["replay"] == "identical"


def test_the_sample_of_a_bad_row_is_named_as_the_batch_counts_it(tmp_path):
    script = """
data = torch.randn(32, 3)
data[21, 1] = float("nan")
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for start in range(0, 32, 8):
    optimizer.zero_grad()
    model(data[start:start + 8]).mean().backward()
    optimizer.step()
"""
    verdict, _ = explain(script, tmp_path)
    assert (verdict["phase"], verdict["step"], verdict["sample"]) == ("data", 2, 5)
    assert verdict["elements"][0]["index"] == [21, 1]


def test_the_sample_of_a_bad_batch_is_named(tmp_path):
    script = """
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    x = torch.randn(6, 3)
    if step == 1:
        x[4, 0] = float("inf")
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
"""
    verdict, _ = explain(script, tmp_path)
    assert (verdict["phase"], verdict["sample"]) in (("data", 4), ("forward", 4))


def test_a_weight_that_starts_bad_is_not_blamed_on_an_earlier_step(tmp_path):
    script = """
table = nn.Embedding(9, 4)
with torch.no_grad():
    table.weight[3] = float("nan")
optimizer = torch.optim.SGD(table.parameters(), 0.1)
for step in range(2):
    optimizer.zero_grad()
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
"""
    verdict, _ = explain(script, tmp_path)
    assert (verdict["phase"], verdict["step"]) == ("parameter", 0)
    assert "before training began" in verdict["hint"]
    assert verdict["elements"][0]["index"] == [3, 0]


def test_a_learning_rate_that_is_nan_is_named(tmp_path):
    script = """
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).mean().backward()
    optimizer.param_groups[0]["lr"] = float("nan") if step == 1 else 0.1
    optimizer.step()  # HERE
"""
    verdict, marked = explain(script, tmp_path)
    assert (verdict["phase"], verdict["source"]["line"]) == ("optimizer", marked)
    assert "learning rate" in verdict["hint"]
    assert "eps" not in verdict["hint"]


def test_a_cast_to_half_precision_says_what_does_not_fit(tmp_path):
    script = """
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    y = model(torch.ones(4, 3) * (1e7 if step == 1 else 1))
    y = y.half().float()  # HERE
    y.mean().backward()
    optimizer.step()
"""
    verdict, marked = explain(script, tmp_path)
    assert (verdict["op"], verdict["source"]["line"]) == ("to", marked)
    assert "does not fit into float16" in verdict["hint"]


def test_zero_times_infinity_is_told_as_such(tmp_path):
    script = """
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
keep = torch.tensor([1.0, 0.0, 1.0])
for step in range(2):
    optimizer.zero_grad()
    scores = model(torch.randn(4, 3)).masked_fill(keep == 0, float("-inf"))
    (scores * keep).sum().backward()  # HERE
    optimizer.step()
"""
    verdict, marked = explain(script, tmp_path)
    assert (verdict["op"], verdict["source"]["line"]) == ("mul", marked)
    assert "0 times infinity" in verdict["hint"]


LATE = """
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(32):
    x = torch.randn(4, 3)
    optimizer.zero_grad()
    y = model(F.dropout(x, 0.3)) * {factor}
    {loss}  # HERE
    loss.backward()
    optimizer.step()
"""


def test_a_step_that_was_not_recorded_is_compared_with_what_is_in_memory(tmp_path):
    script = LATE.format(factor="(0 if step == 30 else 1)", loss="loss = torch.log(y.abs()).mean()")
    verdict, marked = explain(script, tmp_path)
    assert (verdict["step"], verdict["op"], verdict["source"]["line"]) == (30, "log", marked)
    assert verdict["replay"] == "identical"
    assert "still in memory" in verdict["notes"][-1]


def test_gradients_of_a_step_that_was_not_recorded_are_compared(tmp_path):
    script = LATE.format(factor="(0 if step == 30 else 1)", loss="loss = y.square().sum(1).sqrt().mean()")
    verdict, marked = explain(script, tmp_path)
    assert (verdict["step"], verdict["op"], verdict["phase"]) == (30, "sqrt", "backward")
    assert verdict["source"]["line"] == marked
    assert verdict["replay"] == "identical"


def test_the_second_optimizers_step_is_executed_from_where_the_first_one_ended(tmp_path):
    script = """
G, D = nn.Linear(2, 2), nn.Linear(2, 1)
for_g, for_d = torch.optim.SGD(G.parameters(), 0.1), torch.optim.SGD(D.parameters(), 0.1)
for turn in range(16):
    noise = torch.randn(8, 2)
    for_d.zero_grad()
    D(G(noise).detach()).square().mean().backward()
    for_d.step()
    for_g.zero_grad()
    score = D(G(noise)) * (0 if turn == 13 else 1)
    loss = torch.log(score.abs()).mean()  # HERE
    loss.backward()
    for_g.step()
"""
    verdict, marked = explain(script, tmp_path)
    assert verdict["source"]["line"] == marked
    assert (verdict["way"], verdict["replay"]) == ("rest of the loop body", "identical")


def test_a_replay_that_differs_is_not_called_close_because_both_losses_are_nan(tmp_path):
    script = """
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
numbers = list(range(99, -1, -1))
while True:
    turn = numbers.pop()
    optimizer.zero_grad()
    y = model(torch.full((4, 3), float(turn)))
    loss = (y * float("nan")).mean() if turn >= 30 else y.mean()
    loss.backward()
    optimizer.step()
    if turn == 31:
        break
"""
    verdict, _ = explain(script, tmp_path)
    assert (verdict["step"], verdict["replay"]) == (30, "diverged")


def test_overflow_under_a_scaler_is_not_a_symptom():
    model = torch.nn.Linear(3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)

    def step():
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.ones(4, 3)).float().square().mean() * 1e9
        scaler.scale(loss).backward()

    assert not clew.explain_nonfinite(step).found


def test_what_an_iterator_gave_in_this_turn_is_given_again(tmp_path):
    script = """
def batches():
    turn = 0
    while True:
        yield torch.randn(4, 3) + turn, torch.full((4,), float(turn))
        turn += 1
source = batches()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
step = 0
while step < 12:
    x, y = next(source)
    loss = torch.log(9.0 - y).mean() + model(x).mean()  # HERE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
"""
    verdict, marked = explain(script, tmp_path)
    assert (verdict["step"], verdict["source"]["line"], verdict["op"]) == (9, marked, "log")
    assert verdict["elements"][0]["value"] == float("-inf")
    assert verdict["replay"] == "identical"


def test_a_target_too_long_for_its_input_and_a_graph_that_the_lens_takes_apart_further(tmp_path):
    script = """
encoder, criterion = nn.Linear(6, 5), nn.CTCLoss()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
for turn in range(30):
    x, lengths = torch.randn(4, 10, 6), torch.full((4,), 3 if turn < 25 else 12)
    scores = torch.einsum("btd,d->btd", encoder(x), torch.ones(5)).log_softmax(-1).transpose(0, 1)
    loss = criterion(scores, torch.ones(4, 12, dtype=torch.long), torch.full((4,), 10), lengths)  # HERE
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if turn == 25: break
"""
    verdict, marked = explain(script, tmp_path)
    assert (verdict["source"]["line"], verdict["step"], verdict["replay"]) == (marked, 25, "identical")
    assert verdict["hint"].startswith("a target is longer than its input allows")


def test_a_weight_that_belongs_to_no_module_is_no_data(tmp_path):
    script = """
model = nn.Linear(4, 4)
weights = {"w": torch.randn(4, 1).requires_grad_()}
for turn in range(3):
    loss = (model(torch.randn(6, 4)) @ weights["w"]).square().mean()
    loss.backward()
    with torch.no_grad():
        weights["w"] -= weights["w"].grad / (0 if turn else 1)
    weights["w"].grad = None
"""
    verdict, _ = explain(script, tmp_path)
    assert (verdict["phase"], verdict["site"]) == ("parameter", "weights['w']")
    assert verdict["hint"].startswith("weights['w'] was bad before this turn of the loop began")
