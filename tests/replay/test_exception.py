"""The card of an exception: path, shapes, values and a plain sentence, and nothing that could fail again."""

import builtins
import pickle
import sys

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import clew
from clew.cli import main
from clew.store.exception import read_exception
from clew.views.exception_page import make_page, say


class Block(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, 3)

    def forward(self, x):
        x = self.act(self.fc1(x))
        return self.fc2(x)


def fail(action, tmp_path, **names):
    """Run something that raises under a watch and return the card."""
    with pytest.raises(Exception) as caught, clew.watch(out=str(tmp_path), name="run", **names):
        action()
    card = read_exception(tmp_path / "run" / "rank0")
    if card is not None:
        assert card["error"] == caught.type.__name__
        assert make_page(card).blocks
    return card


def values_of(frame):
    return {value["name"]: value for value in frame["values"]}


def test_matrix_shapes_name_the_module_and_the_shapes_on_the_way(tmp_path):
    model = nn.Sequential(nn.Linear(5, 4), Block(hidden=6))
    card = fail(lambda: model(torch.ones(2, 5)).sum().backward(), tmp_path)
    assert card["site"] == "1.fc2"
    assert [module["site"] for module in card["modules"]] == ["(model)", "1", "1.fc2"]
    assert [module["inputs"][0]["facts"]["shape"] for module in card["modules"]] == [[2, 5], [2, 4], [2, 8]]
    assert [(each["site"], each["shape"]) for each in card["before"]] == [
        ("0", [2, 4]),
        ("1.fc1", [2, 8]),
        ("1.act", [2, 8]),
    ]
    assert say(card).startswith("in 1.fc2 (Linear): the layer expects 6 features and got 8")
    call = values_of(card["call"])
    assert call["self.weight"]["facts"]["shape"] == [3, 6]
    assert call["input"]["facts"]["stats"]["count"] == 16
    own = values_of(card["frames"][-1])
    assert own["self.fc2"]["text"] == "Linear(in_features=6, out_features=3, bias=True)"
    assert own["x"]["facts"]["shape"] == [2, 8], "the value at the failure, not the argument"


def label(model, x):
    return F.cross_entropy(model(x), torch.tensor([0, 7])).backward()


def in_place(model, x):
    h = torch.sigmoid(model(x))
    h += 1
    h.sum().backward()


def twice(model, x):
    loss = model(x).square().sum()
    loss.backward()
    loss.backward()


def missing(text):
    raise RuntimeError(text)


def in_checkpoint(checkpoint):
    return checkpoint["state_dict"]


SENTENCES = {
    "label": (label, "the label 7 is not a class: the scores have 3 classes, so labels must lie between 0 and 2"),
    "embedding": (
        lambda _model, _x: nn.Embedding(10, 2)(torch.tensor([1, 12])),
        "the indices run from 1 to 12, but the table has 10 rows (0 to 9)",
    ),
    "dtype": (lambda model, x: model(x.double()), "have a different dtype (input float64, self.weight float32"),
    "device": (lambda model, x: model(x.to("meta")), "have a different device (input meta, self.weight cpu"),
    "in place": (in_place, "a tensor of shape [2, 3], made by Sigmoid, was changed in place"),
    "second backward": (twice, "the graph was used by an earlier backward and is gone"),
    "no gradient": (lambda model, x: model(x).detach().sum().backward(), "the loss does not depend on any weight"),
    "not a number": (lambda model, x: model(x).backward(), "the loss has more than one element"),
    "index": (lambda _model, x: x[5], "the index 5 does not exist: dimension 0 has 2 elements"),
    "broadcast": (lambda model, x: model(x) + torch.ones(2, 5), "dimension 1 is 3 in one tensor and 5 in the other"),
    "memory": (lambda _model, _x: torch.empty(1 << 50), "the memory is full: 4.5 PB were asked for at once"),
    "product": (lambda _model, x: x @ x, "the last size of the first, 4, must be the first of the second, 2"),
    "batches": (lambda _model, x: x[None] @ x[None], "transpose one, as in k.transpose(-2, -1)"),
    "stack": (lambda _model, x: torch.stack([x, x[0]]), "the first has [2, 4], number 1 has [4]"),
    "targets": (
        lambda model, x: F.binary_cross_entropy_with_logits(model(x)[:, :1], torch.ones(2)),
        "the scores have the shape [2, 1] and the targets [2]",
    ),
    "probabilities": (lambda _model, x: F.binary_cross_entropy(x * 2, x), "binary_cross_entropy takes probabilities"),
    "label type": (lambda model, x: F.cross_entropy(model(x), torch.ones(2)), "convert them with y.long()"),
    "leaf": (lambda model, _x: model.weight.add_(1), "do so under torch.no_grad()"),
    "truth": (lambda _model, x: bool(x > 0), "use .any() or .all()"),
    "no cuda": (lambda _model, _x: missing("Torch not compiled with CUDA enabled"), "cannot use a GPU"),
    "none": (lambda _model, _x: None.mean(), "does the forward that made it return its result?"),
    "no weights": (lambda _model, _x: torch.optim.SGD([]), "the optimizer was given no weights"),
    "not a leaf": (lambda model, _x: torch.optim.SGD([model.weight * 2]), "give it the nn.Parameter itself"),
    "missing names": (
        lambda model, _x: model.load_state_dict({"module.weight": 1, "module.bias": 2}),
        "the model has not; it was saved from a model in DataParallel or DistributedDataParallel: take 'module.' off",
    ),
    "other shapes": (
        lambda model, _x: model.load_state_dict(nn.Linear(6, 3).state_dict()),
        "weight is [3, 6] in the checkpoint and [3, 4] in the model",
    ),
    "missing key": (
        lambda model, _x: in_checkpoint({"model": model.state_dict()}),
        "checkpoint has no 'state_dict'; it has model",
    ),
    "dead worker": (
        lambda _model, _x: missing("DataLoader worker (pid 7) is killed by signal: Bus error. It is"),
        "most likely the shared memory is full",
    ),
    "pickle": (lambda _model, _x: pickle.dumps(lambda: 0), "cannot be pickled, which processes that are spawned"),
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_a_plain_sentence_for_the_common_ones(name, tmp_path):
    action, sentence = SENTENCES[name]
    model, x = nn.Linear(4, 3), torch.ones(2, 4)
    card = fail(lambda: action(model, x), tmp_path)
    assert sentence in say(card)


def test_a_full_memory_says_what_held_it(tmp_path):
    model = nn.Linear(256, 256)
    model(torch.ones(1, 256)).sum().backward()
    card = fail(lambda: torch.empty(1 << 50), tmp_path)
    held = {each["what"]: each["bytes"] for each in card["memory"]}
    assert held["weights"] >= 256 * 257 * 4
    assert held["gradients"] >= 256 * 257 * 4
    assert any(what.startswith("largest: ") for what in held)


class Trap:
    """An object that must not be asked for anything."""

    def __repr__(self):
        raise AssertionError("asked for its repr")

    @property
    def size(self):
        raise AssertionError("asked for an attribute")


def test_values_are_cut_and_secrets_stay_hidden(tmp_path):
    api_key, text, trap = "123", "x" * 500, Trap()
    note, numbers, array = "hf_abcdefghijkl", list(range(1000)), np.zeros((3, 4))

    def use(*_given):
        raise RuntimeError("too bad")

    def call():
        return use(torch.ones(3), api_key, text, trap, note, numbers, array, trap.size if False else x)

    x = torch.ones(2)
    card = fail(call, tmp_path)
    values = values_of(next(frame for frame in card["frames"] if frame["function"] == "call"))
    assert values["api_key"]["text"] == values["note"]["text"] == "(hidden)"
    assert len(values["text"]["text"]) < 90
    assert values["trap"]["text"] == "a Trap"
    assert values["numbers"]["text"] == "list of 1000: 0, 1, 2, 3, …"
    assert values["array"]["text"] == "numpy float64[3, 4]"
    assert values["x"]["facts"]["entries"] == [1.0, 1.0]
    assert "torch" not in values


class Mute(Exception):
    def __str__(self):
        raise AssertionError("asked for its text")


def fail_twice(x):
    try:
        x.view(5, -1)
    except RuntimeError as error:
        raise Mute from error


def test_the_exceptions_behind_one_are_told_with_their_values(tmp_path):
    card = fail(lambda: fail_twice(torch.ones(4, 6)), tmp_path)
    assert card["error"] == "Mute"
    (behind,) = card["related"]
    assert (behind["how"], behind["error"]) == ("caused by", "RuntimeError")
    assert say(behind).startswith("the sizes (5, -1) do not multiply to 24")
    assert values_of(card["frames"][-1])["x"]["facts"]["shape"] == [4, 6]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups before")
def test_every_exception_of_a_group_is_told(tmp_path):
    def fall():
        x, errors = torch.ones(2), []
        for size in (3, 5):
            try:
                x.view(size)
            except RuntimeError as error:
                errors.append(error)
        raise builtins.ExceptionGroup("several", errors)

    card = fail(fall, tmp_path)
    assert [each["how"] for each in card["related"]] == ["one of them", "one of them"]


def test_an_exception_that_a_worker_passed_on_names_the_line_there(tmp_path):
    text = (
        "Caught ValueError in DataLoader worker process 3.\nOriginal Traceback (most recent call last):\n"
        '  File "/home/me/data.py", line 7, in __getitem__\n    raise ValueError("no")\nValueError: cannot decode\n'
    )
    card = fail(lambda: missing(text), tmp_path)
    assert (
        say(card) == "in worker process 3 of a loader: ValueError: cannot decode, at data.py:7 in __getitem__"
    )


class Endless(nn.Module):
    def forward(self, x): return self(x)  # fmt: skip


def test_a_function_that_calls_itself_is_told_once(tmp_path):
    card = fail(lambda: Endless()(torch.ones(2)), tmp_path)
    assert "forward calls itself without end" in say(card)
    own = [frame for frame in card["frames"] if frame["function"] == "forward"]
    assert len(own) == 1
    assert values_of(own[0])["x"]["facts"]["shape"] == [2]


def test_the_values_in_a_hook_are_those_of_the_lambda(tmp_path):
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda gradient: gradient.reshape(7, 7))
    card = fail(lambda: weight.sum().backward(), tmp_path)
    assert values_of(card["call"])["gradient"]["facts"]["shape"] == [4]


def test_an_exception_that_has_nothing_to_do_with_torch_has_no_card(tmp_path):
    assert fail(lambda: {}["missing"], tmp_path) is None


def test_an_exception_of_clew_speaks_for_itself(tmp_path):
    assert fail(lambda: clew.check(torch.tensor([float("nan")]), finite=True), tmp_path) is None


def test_show_mentions_it_and_prints_the_card(tmp_path, capsys):
    fail(lambda: label(nn.Linear(4, 3), torch.ones(2, 4)), tmp_path)
    assert main(["show", str(tmp_path / "run")]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "ended by IndexError at step 0" in page
    assert "the label 7 is not a class" in page
    assert main(["show", str(tmp_path / "run"), "--exception"]) == 0
    assert "cross_entropy(model(x), torch.tensor([0, 7]))" in capsys.readouterr().out


def test_show_says_when_there_was_none(tmp_path, capsys):
    with clew.watch(out=str(tmp_path), name="run"):
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert main(["show", str(tmp_path / "run"), "--exception"]) == 2
    assert "no exception of torch ended this run" in capsys.readouterr().err


def test_a_file_that_is_no_card_is_passed_over(tmp_path):
    (tmp_path / "exception.json").write_text("[1]")
    assert read_exception(tmp_path) is None
    (tmp_path / "exception.json").write_text("{")
    assert read_exception(tmp_path) is None


def test_a_script_gets_the_card_after_its_own_traceback(zygote, tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 3)\nx = torch.ones(2, 5)\nmodel(x).sum().backward()\n"
    )
    done = zygote.clew(tmp_path, "run", "--no-status", "--out", "runs", "train.py")
    assert done.code == 1
    assert done.stdout == ""
    own, _, card = done.stderr.partition("clew: ")
    assert own.startswith("Traceback")
    assert own.rstrip().endswith("mat1 and mat2 shapes cannot be multiplied (2x5 and 4x3)")
    assert "in (model) (Linear): the layer expects 4 features and got 5" in card
    assert all(line.startswith("clew:") for line in done.stderr[len(own) :].splitlines())
