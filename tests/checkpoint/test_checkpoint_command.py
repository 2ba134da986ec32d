"""``clew ckpt``: what it prints, what it returns, what it refuses."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch
import torch._dynamo
from torch import nn

import clew.compare.checkpoint_measure as measuring
from clew.api.checkpoint import diff_checkpoints, open_checkpoint, scan_checkpoint
from clew.cli import main
from clew.compare.checkpoint import summarise_checkpoint
from clew.errors import CheckpointUntrusted
from clew.render.progress import ByteBar
from clew.stats import reference
from clew.store.checkpoint_dtype import ELEMENT_TYPES, widen

if TYPE_CHECKING:
    from pathlib import Path


class Trusted:
    """A class of the user's own, so that a file with it needs trust."""

    def __init__(self, value):
        self.value = value


def run(capsys, *words: str | Path):
    code = main(["ckpt", *map(str, words)])
    return code, capsys.readouterr().out


def run_json(capsys, *words: str | Path):
    code, text = run(capsys, *words, "--json")
    return code, json.loads(text)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(20, 8, padding_idx=0),
            "body": nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.BatchNorm1d(8)),
            "head": nn.Linear(8, 20),
        }
    )


@pytest.fixture
def saved(tmp_path):
    model = make_model()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    return model, tmp_path


def test_show_gives_every_tensor_with_its_statistics(saved, capsys):
    model, folder = saved
    code, page = run_json(capsys, "show", folder / "a.pt")
    assert code == 0
    tensors = {each["name"]: each for each in page["tensors"]}
    assert list(tensors) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        row = reference.summarise(tensor.numpy())
        found = tensors[name]
        assert found["shape"] == list(tensor.shape)
        assert found["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert found["size_bytes"] == tensor.nbytes
        np.testing.assert_allclose(list(found["stats"].values()), row, rtol=1e-5, atol=1e-6)
    groups = {group["name"]: group for group in page["groups"]}
    assert list(groups) == ["embed", "body", "head"]
    assert sum(group["elements"] for group in groups.values()) == sum(
        tensor.numel() for tensor in model.state_dict().values()
    )
    assert groups["embed"]["l2"] == pytest.approx(float(model["embed"].weight.detach().norm()))


def test_show_on_a_terminal_adds_up(saved, capsys, monkeypatch):
    _, folder = saved
    monkeypatch.setenv("COLUMNS", "160")
    code, text = run(capsys, "show", folder / "a.pt")
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == str(folder / "a.pt")
    assert "format torch tensors 14 elements 685" in " ".join(text.split())
    table = lines[lines.index("  tensors") + 2 :]
    assert sum(line.startswith("  body.") for line in table) >= 9
    assert "largest magnitudes" in text
    assert "smallest magnitudes" in text


def test_show_sorts_matches_limits_and_groups(saved, capsys):
    _, folder = saved
    path = folder / "a.pt"
    _, page = run_json(capsys, "show", path, "--sort", "abs_max")
    values = [each["stats"]["abs_max"] for each in page["tensors"]]
    assert values == sorted(values, reverse=True)
    _, page = run_json(capsys, "show", path, "--match", "*.weight,!body.*")
    assert [each["name"] for each in page["tensors"]] == ["embed.weight", "head.weight"]
    _, page = run_json(capsys, "show", path, "--depth", "2")
    assert [group["name"] for group in page["groups"]] == [
        "embed",
        "body.0",
        "body.1",
        "body.2",
        "body.3",
        "head",
    ]
    _, text = run(capsys, "show", path, "--limit", "3")
    assert "more; --limit 0 shows all" in text


def test_show_warns_of_nan_and_names_the_optimizer(tmp_path, capsys):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight[1, 2] = float("nan")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    torch.save(saved, tmp_path / "a.pt")
    code, text = run(capsys, "show", tmp_path / "a.pt")
    assert code == 0
    assert "1 tensor with NaN or infinite values: weight" in text
    assert "optimizer/weight/exp_avg" in text
    assert "2 counters of the optimizer are left out: all 1" in text
    assert "epoch" in text


@pytest.mark.parametrize("name", [n for n in ELEMENT_TYPES if not n.startswith("complex")])
def test_statistics_of_every_element_type(tmp_path, name):
    element = ELEMENT_TYPES[name]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 3000 * element.item_bytes, dtype=np.uint8).view(element.carrier)
    if name in ("float16", "float32", "float64"):
        raw = rng.standard_normal(3000).astype(name)
    if name == "bool":
        raw &= 1
    from clew.store.checkpoint import Checkpoint
    from clew.store.checkpoint_bytes import MemoryBytes
    from clew.store.checkpoint_tensor import StoredTensor

    tensor = StoredTensor("x", element, raw.shape, MemoryBytes(raw.view(np.uint8)))
    with np.errstate(all="ignore"):
        expected = reference.summarise(widen(raw, element))
        (found,) = summarise_checkpoint(Checkpoint(tmp_path, "memory", (tensor,), {}))
    np.testing.assert_allclose(list(found.stats.values()), expected, rtol=1e-5)


def test_diff_tells_changed_unchanged_added_removed_reshaped_and_retyped(saved, capsys):
    model, folder = saved
    other = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other["body.0.weight"] *= 1.001
    other["body.2.weight"][3, 4] += 0.5
    other["head.weight"] = other["head.weight"][:10]
    other["body.1.weight"] = other["body.1.weight"].double()
    other["head.bias"] = torch.nextafter(other["head.bias"], torch.ones(20))
    del other["body.0.bias"]
    other["extra.weight"] = torch.ones(2)
    torch.save(other, folder / "b.pt")
    code, page = run_json(capsys, "diff", folder / "a.pt", folder / "b.pt")
    assert code == 1
    assert page["same"] is False
    verdicts = {each["name"]: each["verdict"] for each in page["changed"]}
    assert verdicts == {
        "body.0.weight": "different",
        "body.1.weight": "same",
        "body.2.weight": "different",
        "head.bias": "rounding",
    }
    found = {each["name"]: each["difference"] for each in page["changed"]}
    assert found["body.0.weight"]["relative_l2"] == pytest.approx(1e-3, rel=1e-3)
    assert found["body.2.weight"]["different"] == 1
    assert found["body.2.weight"]["max_abs"] == pytest.approx(0.5)
    assert found["body.2.weight"]["max_abs_at"] == 3 * 16 + 4
    assert found["head.bias"]["max_ulp"] == 1
    assert found["head.bias"]["bias"] == 1.0
    assert page["only_a"] == ["body.0.bias"]
    assert page["only_b"] == ["extra.weight"]
    assert page["reshaped"] == [{"name": "head.weight", "shape": [20, 8], "shape_b": [10, 8]}]
    assert "embed.weight" in page["unchanged"]
    groups = {group["name"]: (group["changed"], group["tensors"]) for group in page["groups"]}
    assert groups == {"embed": (0, 1), "body": (3, 10), "head": (1, 1)}
    code, text = run(capsys, "diff", folder / "a.pt", folder / "b.pt")
    assert code == 1
    assert (
        "2 of 12 tensors differ, 1 differ by rounding only, 1 have another dtype and equal values, "
        "1 have another shape, 1 only in the first, 1 only in the second, 8 unchanged" in text
    )
    for title in ("largest changes", "groups", "other shape", "only in the first (1)", "unchanged (8)"):
        assert title in text


def test_diff_of_the_same_weights_in_two_formats_and_under_wrappers(saved, capsys):
    model, folder = saved
    safetensors.torch.save_file(model.state_dict(), folder / "b.safetensors")
    np.savez(folder / "c.npz", **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    wrapped = {f"_orig_mod.module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 1}, folder / "d.ckpt")
    for name in ("a.pt", "b.safetensors", "c.npz", "d.ckpt"):
        code, page = run_json(capsys, "diff", folder / "a.pt", folder / name)
        assert (code, page["same"], page["changed"]) == (0, True, [])
        assert len(page["unchanged"]) == len(model.state_dict())
    (note,) = page["notes"]
    assert note.startswith(
        f"{len(wrapped)} names match without their wrappers, such as embed.weight and _orig"
    )
    code, text = run(capsys, "diff", folder / "a.pt", folder / "d.ckpt")
    assert f"the same: all {len(wrapped)} tensors are equal" in text


def test_equal_nans_and_signs_of_zero_are_no_difference(tmp_path, capsys):
    torch.save({"x": torch.tensor([float("nan"), 0.0, 1.0])}, tmp_path / "a.pt")
    torch.save({"x": torch.tensor([-float("nan"), -0.0, 1.0])}, tmp_path / "b.pt")
    assert run_json(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 0


def test_values_that_differ_are_told_but_do_not_count(tmp_path, capsys):
    for name, epoch in (("a", 1), ("b", 2)):
        torch.save(
            {"model": {"x": torch.ones(1)}, "epoch": epoch, "nan": float("nan")}, tmp_path / f"{name}.pt"
        )
    code, page = run_json(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (code, page["values"]) == (0, {"epoch": [1, 2]})


def test_one_step_of_training_changes_every_parameter_but_the_frozen(tmp_path, capsys):
    model = make_model()
    model["head"].weight.requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    torch.save(model.state_dict(), tmp_path / "0.pt")
    out = model["head"](model["body"](model["embed"](torch.arange(1, 9))))
    out.square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "1.pt")
    _, page = run_json(capsys, "diff", tmp_path / "0.pt", tmp_path / "1.pt")
    # The bias in front of the batch norm cannot matter, so nothing moves it.
    assert page["unchanged"] == ["body.2.bias", "head.weight"]


def test_large_tensors_in_pieces_give_the_same(tmp_path, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(100_003, generator=rng)
    y = x.clone()
    y[77_777] += 1.0
    torch.save({"x": x, "half": x.bfloat16(), "t": x[:100_000].reshape(100, 1000).t()}, tmp_path / "a.pt")
    torch.save({"x": y, "half": y.bfloat16(), "t": y[:100_000].reshape(100, 1000).t()}, tmp_path / "b.pt")
    whole = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    stats = summarise_checkpoint(open_checkpoint(tmp_path / "a.pt"))
    monkeypatch.setattr(measuring, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(measuring, "PIECE_BYTES", 40_000)
    pieces = diff_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    for one, other in zip(whole.changed, pieces.changed, strict=True):
        assert one.difference.different == other.difference.different == 1
        assert one.difference.max_abs_at == other.difference.max_abs_at
        assert one.difference.relative_l2 == pytest.approx(other.difference.relative_l2, rel=1e-5)
    assert whole.changed[0].difference.max_abs_at == 77_777
    for one, other in zip(stats, summarise_checkpoint(open_checkpoint(tmp_path / "a.pt")), strict=True):
        np.testing.assert_allclose(list(one.stats.values()), list(other.stats.values()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("module", ["BUILT", "_pair"])
def test_without_a_compiler_the_numbers_are_the_same(saved, monkeypatch, module):
    model, folder = saved
    other = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other["body.0.weight"] += 0.25
    torch.save(other, folder / "b.pt")
    fast = diff_checkpoints(folder / "a.pt", folder / "b.pt")
    fast_stats = summarise_checkpoint(open_checkpoint(folder / "a.pt"))
    monkeypatch.setattr(measuring, module, None)
    slow = diff_checkpoints(folder / "a.pt", folder / "b.pt")
    slow_stats = summarise_checkpoint(open_checkpoint(folder / "a.pt"))
    assert fast.unchanged == slow.unchanged
    assert fast.changed[0].difference.relative_l2 == pytest.approx(slow.changed[0].difference.relative_l2)
    for one, two in zip(fast_stats, slow_stats, strict=True):
        np.testing.assert_allclose(list(one.stats.values()), list(two.stats.values()), rtol=1e-5, atol=1e-7)


def save_healthy(path: Path) -> dict[str, torch.Tensor]:
    """A trained model with its optimizer, buffers, padding row and fresh norms: nothing is wrong with it."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    out = model["head"](model["body"](model["embed"](torch.arange(1, 9))))
    out.square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model.state_dict()


def test_scan_is_silent_on_healthy_checkpoints(tmp_path, capsys):
    save_healthy(tmp_path / "trained.pt")
    torch.save(make_model().state_dict(), tmp_path / "fresh.pt")
    torch.save(make_model().bfloat16().state_dict(), tmp_path / "half.pt")
    names = ("trained.pt", "fresh.pt", "half.pt")
    code, text = run(capsys, "scan", *(tmp_path / name for name in names))
    assert code == 0
    assert text.count("nothing wrong in") == 3


def damage(state, kind):
    weight = state["body.0.weight"]
    if kind == "nan":
        weight[2, 3] = float("nan")
    elif kind == "inf":
        weight[0, 1], weight[5, 5] = float("inf"), -float("inf")
    elif kind == "zero":
        weight.zero_()
    elif kind == "constant":
        weight.fill_(0.5)
    elif kind == "rows":
        weight[7] = weight[2]
        weight[9] = weight[2]
    elif kind == "denormal":
        weight[:4] *= 1e-40
    elif kind == "negative":
        state["body.3.running_var"][1] = -0.5
    return state


TEXTS = {
    "nan": "body.0.weight: 1 of 128 are NaN, first at [2, 3]",
    "inf": "body.0.weight: 2 of 128 are infinite (1 +inf, 1 -inf), first at [0, 1]",
    "zero": "body.0.weight: all zero",
    "constant": "body.0.weight: all equal to 0.5",
    "rows": "body.0.weight: 2 of 16 rows repeat an earlier row, first row 7",
    "denormal": "body.0.weight: 32 of 128 are denormal",
    "negative": "body.3.running_var: 1 of 8 are negative, which a variance cannot be",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_scan_finds_each_flaw_and_only_it(tmp_path, capsys, kind):
    state = damage({name: tensor.clone() for name, tensor in make_model().state_dict().items()}, kind)
    torch.save(state, tmp_path / "a.pt")
    code, page = run_json(capsys, "scan", tmp_path / "a.pt")
    assert code == 1
    serious = [flaw for flaw in page["files"][0]["flaws"] if flaw["severity"] != "note"]
    assert [flaw["kind"] for flaw in serious] == [kind]
    code, text = run(capsys, "scan", tmp_path / "a.pt")
    assert TEXTS[kind] in text


def test_scan_of_rows_larger_than_a_block_and_rows_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BLOCK_BYTES", 1000)
    torch.manual_seed(0)
    wide, odd = torch.randn(5, 777), torch.randn(50, 33)
    wide[4] = wide[1]
    odd[49] = odd[0]
    near = torch.randn(6, 777)
    near[5] = near[2]
    near[5, 3] += 1.0
    torch.save({"wide": wide, "odd": odd, "near": near, "t": odd.t()}, tmp_path / "a.pt")
    flaws = [(flaw.tensor, flaw.at) for flaw in scan_checkpoint(tmp_path / "a.pt")]
    assert flaws == [("wide", (4,)), ("odd", (49,))]


def test_few_bits_make_no_coincidence(tmp_path):
    narrow = torch.randn(64, 1).to(torch.float8_e4m3fn).float().bfloat16()
    assert len(narrow.unique()) < 64
    torch.save({"narrow": narrow}, tmp_path / "a.pt")
    assert scan_checkpoint(tmp_path / "a.pt") == []


def test_scan_gathers_notes_and_fails_on_them_when_asked(tmp_path, capsys):
    torch.save({"bias": torch.zeros(4), "table": torch.eye(4) * 1e6}, tmp_path / "a.pt")
    code, text = run(capsys, "scan", tmp_path / "a.pt")
    assert code == 0
    assert "all zero: bias" in text
    assert "beyond the range of float16: table" in text
    assert run(capsys, "scan", tmp_path / "a.pt", "--fail-on", "note")[0] == 1


def test_scan_of_an_unreadable_file_among_others(tmp_path, capsys):
    torch.save({"x": torch.tensor([float("nan"), 1.0])}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"PK\x03\x04 cut")
    code = main(["ckpt", "scan", str(tmp_path / "b.pt"), str(tmp_path / "a.pt")])
    out, err = capsys.readouterr()
    assert code == 2
    assert "x: 1 of 2 are NaN" in out
    assert "damaged or cut off" in err
    code, page = run_json(capsys, "scan", tmp_path / "b.pt", tmp_path / "a.pt")
    assert [each["path"] for each in page["unreadable"]] == [str(tmp_path / "b.pt")]


def test_trust_reads_what_was_refused(tmp_path, capsys):
    model = nn.Linear(2, 2)
    torch.save({"model": model, "extra": Trusted(3)}, tmp_path / "a.pt")
    assert main(["ckpt", "show", str(tmp_path / "a.pt")]) == 2
    assert "'torch.nn.modules.linear.Linear'" in capsys.readouterr().err
    code, page = run_json(capsys, "show", tmp_path / "a.pt", "--trust")
    assert code == 0
    assert [each["name"] for each in page["tensors"]] == ["weight", "bias"]
    torch.save({"x": torch.ones(2).bfloat16()}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tensor,) = open_checkpoint(tmp_path / "old.pt", trust=True).tensors
    assert (tensor.dtype, tensor.load().tolist()) == ("bfloat16", [16256, 16256])
    np.save(tmp_path / "d.npy", {"w": np.ones(2)}, allow_pickle=True)
    (tensor,) = open_checkpoint(tmp_path / "d.npy", trust=True).tensors
    assert (tensor.name, tensor.load().tolist()) == ("w", [1.0, 1.0])
    with pytest.raises(CheckpointUntrusted):
        open_checkpoint(tmp_path / "d.npy")


def test_a_torchscript_program_needs_trust(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "a.pt")
    with pytest.raises(CheckpointUntrusted, match="TorchScript program"):
        open_checkpoint(tmp_path / "a.pt")
    names = [tensor.name for tensor in open_checkpoint(tmp_path / "a.pt", trust=True).tensors]
    assert sorted(names) == ["bias", "weight"]


def test_trust_of_a_file_that_needs_code_which_is_not_there(tmp_path):
    program = b"\x80\x02cnot_there_at_all\nThing\n)R."
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/version", "3\n")
    with pytest.raises(CheckpointUntrusted, match="torch cannot unpickle it") as caught:
        open_checkpoint(tmp_path / "a.pt", trust=True)
    assert "can be imported" in caught.value.next_step


def test_a_safe_file_is_read_safely_even_when_trusted(tmp_path, monkeypatch):
    torch.save({"x": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setattr(torch, "load", lambda *_: pytest.fail("nothing had to be unpickled"))
    assert open_checkpoint(tmp_path / "a.pt", trust=True).tensors[0].name == "x"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "nothing to do"),
        (["model.pt"], "next:  clew ckpt show model.pt"),
        (["shwo", "a"], "did you mean 'show'?"),
        (["show"], "clew ckpt show takes one file, not 0"),
        (["diff", "a"], "clew ckpt diff takes two files, not 1"),
        (["scan"], "no file to scan"),
        (["show", "a", "--sort", "siez"], "did you mean 'size'?"),
        (["show", "a", "--limit", "-1"], "no number of rows"),
        (["show", "a", "--depth", "0"], "no number of parts"),
        (["scan", "a", "--fail-on", "all"], "'all' is no level"),
        (["show", "a", "--jsno"], "did you mean '--json'?"),
        (["show", "/nowhere/a.pt"], "no such file or folder"),
    ],
)
def test_wrong_words_are_answered(capsys, words, text):
    assert main(["ckpt", *words]) == 2
    assert text in capsys.readouterr().err


def test_options_may_stand_between_the_files(saved, capsys):
    _, folder = saved
    words = ["diff", str(folder / "a.pt"), "--match", "*.weight", str(folder / "a.pt"), "--limit", "2"]
    assert main(["ckpt", *words]) == 0
    assert "all 6 tensors are equal" in capsys.readouterr().out


def write_sparse(path: Path, megabytes: int) -> None:
    """A safetensors file of zeros that takes no room on the disk."""
    size = megabytes << 20
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"x": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)


def test_memory_does_not_grow_with_the_file(tmp_path):
    write_sparse(tmp_path / "small.safetensors", 4)
    write_sparse(tmp_path / "large.safetensors", 400)
    # Not ru_maxrss, which counts the process that started this one, too.
    code = (
        "import sys; from clew.cli import main; main(['ckpt', *sys.argv[1:], '--json'])\n"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0], file=sys.stderr)"
    )
    peaks = {}
    for name in ("small", "large"):
        for action in ("diff", "show", "scan"):
            files = [str(tmp_path / f"{name}.safetensors")] * (2 if action == "diff" else 1)
            command = [sys.executable, "-c", code, action, *files]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[name, action] = int(done.stderr.split()[0])
    for action in ("diff", "show", "scan"):
        assert peaks["large", action] - peaks["small", action] < 40_000, action


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_appears_on_a_terminal_after_a_while_and_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    now = iter([0.0, 0.1, 1.0, 1.05, 2.0])
    stream = Terminal()
    with ByteBar("reading", 100, stream=stream, clock=lambda: next(now)) as bar:
        bar.advance(10)
        assert stream.getvalue() == ""
        bar.advance(40)
        assert "reading [###############...............] 50.0 %  50 B/s" in stream.getvalue()
        drawn = stream.getvalue()
        bar.advance(1)
        assert stream.getvalue() == drawn
        bar.advance(49)
    assert stream.getvalue().endswith("\r\x1b[K")
    silent = io.StringIO()
    with ByteBar("reading", 1, stream=silent) as bar:
        bar.advance(1)
    assert silent.getvalue() == ""


def test_the_command_never_unpickles(tmp_path, monkeypatch, capsys):
    torch.save({"x": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    monkeypatch.setattr(pickle, "Unpickler", lambda *_: pytest.fail("unpickled"))
    assert run(capsys, "show", tmp_path / "a.pt")[0] == 0
