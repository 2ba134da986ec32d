"""Every format gives the same names, shapes, dtypes and bits as its own library does."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import safetensors.torch
import torch
import torch._dynamo
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn

from clew.errors import CheckpointBroken
from clew.store.checkpoint import read_checkpoint
from clew.store.checkpoint_dtype import ELEMENT_TYPES, widen
from clew.store.tensors import read_tensors, write_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_equal(stored, tensor: torch.Tensor, limit: int = 7) -> None:
    """Names aside, a stored tensor is the torch tensor: in whole and in blocks."""
    assert f"torch.{stored.dtype}" == str(tensor.dtype)
    assert stored.shape == tuple(tensor.shape)
    assert np.ascontiguousarray(stored.load()).tobytes() == bits(tensor)
    blocks = [block.copy() for block in stored.blocks(limit)]
    assert all(len(block) == limit for block in blocks[:-1])
    assert b"".join(block.tobytes() for block in blocks) == bits(tensor)


def by_name(path: Path):
    return {tensor.name: tensor for tensor in read_checkpoint(path).tensors}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_save_of_every_dtype(tmp_path, dtype):
    tensor = torch.arange(60).reshape(3, 4, 5).to(torch.uint8).to(torch.float32).to(dtype)
    torch.save({"x": tensor, "none": tensor[:0]}, tmp_path / "a.pt")
    found = by_name(tmp_path / "a.pt")
    assert_equal(found["x"], tensor)
    assert_equal(found["none"], tensor[:0])


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d is not torch.complex128], ids=str)
def test_safetensors_of_every_dtype(tmp_path, dtype):
    tensor = torch.arange(60).reshape(3, 4, 5).to(torch.float32).to(dtype)
    safetensors.torch.save_file({"x": tensor, "scalar": tensor[0, 0, 1].clone()}, tmp_path / "a.safetensors")
    found = by_name(tmp_path / "a.safetensors")
    assert_equal(found["x"], tensor)
    assert_equal(found["scalar"], tensor[0, 0, 1])


@pytest.mark.parametrize(
    "name", [n for n, e in ELEMENT_TYPES.items() if e.is_float and e.packed == 1 and e.item_bytes < 4]
)
def test_widening_gives_the_values_torch_gives(name):
    element = ELEMENT_TYPES[name]
    raw = np.arange(2 ** (8 * element.item_bytes), dtype=f"u{element.item_bytes}").view(element.carrier)
    unsigned = {1: torch.uint8, 2: torch.int16}[element.item_bytes]
    expected = torch.from_numpy(raw.view(f"{'u' if element.item_bytes == 1 else 'i'}{element.item_bytes}"))
    expected = expected.view(unsigned).view(getattr(torch, name)).float().numpy()
    np.testing.assert_array_equal(widen(raw, element), expected)


def test_four_bit_floats_are_two_to_a_byte():
    values = widen(np.array([0x21, 0xF7], np.uint8), ELEMENT_TYPES["float4_e2m1fn_x2"])
    assert values.tolist() == [0.5, 1.0, 6.0, -6.0]


def test_views_keep_their_logical_order(tmp_path):
    base = torch.arange(48.0).reshape(4, 12)
    views = {
        "transposed": base.t(),
        "part": base[1:3, 2:7],
        "every_second": base[:, ::2],
        "expanded": base[0].expand(5, 12),
        "windows": base[0].unfold(0, 4, 2),
        "offset_row": base[2],
        "scalar": base[3, 3],
    }
    torch.save(views, tmp_path / "a.pt")
    found = by_name(tmp_path / "a.pt")
    for name, view in views.items():
        assert_equal(found[name], view)


def test_parameters_buffers_sparse_and_arrays(tmp_path):
    sparse = torch.eye(3).to_sparse()
    saved = {
        "parameter": nn.Parameter(torch.ones(2)),
        "buffer": nn.Buffer(torch.zeros(2)),
        "sparse": sparse,
        "array": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "big_endian": np.arange(3, dtype=">i4"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved["rows"] = torch.eye(3).to_sparse_csr()
    torch.save(saved, tmp_path / "a.pt")
    found = by_name(tmp_path / "a.pt")
    assert_equal(found["parameter"], torch.ones(2))
    assert_equal(found["sparse.values"], sparse.coalesce().values())
    assert_equal(found["rows.crow_indices"], torch.arange(4))
    assert found["array"].load().tolist() == saved["array"].tolist()
    assert found["big_endian"].load().tolist() == [0, 1, 2]


def test_what_is_no_tensor_is_a_value(tmp_path):
    saved = {
        "model": {"w": torch.ones(1)},
        "epoch": 3,
        "best": np.float64(0.5),
        "losses": [1.0, 0.5],
        "args": argparse.Namespace(lr=0.1, name="x"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "blob": b"abc",
        "tags": {"one"},
        "folder": Path("/somewhere/else"),
    }
    torch.save(saved, tmp_path / "a.pt")
    values = read_checkpoint(tmp_path / "a.pt").values
    assert values == {
        "epoch": 3,
        "best": 0.5,
        "losses": (1.0, 0.5),
        "args.lr": 0.1,
        "args.name": "x",
        "size": (2, 3),
        "dtype": "torch.bfloat16",
        "device": "torch.device(cpu)",
        "blob": "3 bytes",
        "tags": ("one",),
        "folder": "pathlib.PosixPath(/, somewhere, else)",
    }


def test_tied_weights_are_told_and_counted_once(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    torch.save(model.state_dict(), tmp_path / "a.pt")
    checkpoint = read_checkpoint(tmp_path / "a.pt")
    assert checkpoint.tied == {"head.weight": "embed.weight"}
    assert checkpoint.size_bytes == 160


@pytest.mark.parametrize("compressed", [False, True])
def test_npz_and_npy(tmp_path, compressed):
    arrays = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b/c": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(4, dtype=">f8"),
        "empty": np.empty((0, 3)),
        "scalar": np.float16(1.5),
    }
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", **arrays)
    found = by_name(tmp_path / "a.npz")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].load().tolist() == array.tolist()
        assert [x for block in found[name].blocks(5) for x in block.tolist()] == array.ravel().tolist()
    np.save(tmp_path / "one.npy", arrays["a"])
    assert by_name(tmp_path / "one.npy")["one"].load().tolist() == arrays["a"].tolist()


def test_bfloat16_of_other_frameworks_in_npz(tmp_path):
    raw = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "a.npz", w=raw)
    tensor = by_name(tmp_path / "a.npz")["w"]
    assert (tensor.dtype, widen(tensor.load(), tensor.element).tolist()) == ("bfloat16", [1.5, -2.0])


def test_what_we_write_the_safetensors_package_reads(tmp_path):
    bf16 = torch.arange(5.0).bfloat16()
    arrays = {
        "flag": np.array([True, False, True]),
        "wide": np.arange(3.0),
        "half": bf16.view(torch.int16).numpy().view(np.uint16),
        "scalar": np.float32(2.0).reshape(()),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "none": np.empty((0, 2), np.float32),
    }
    path = tmp_path / "a.safetensors"
    write_tensors(path, arrays, dtypes={"half": "bfloat16"}, metadata={"step": "7"})
    read = safetensors.torch.load_file(path)
    assert torch.equal(read["half"], bf16)
    for name in set(arrays) - {"half"}:
        assert read[name].tolist() == arrays[name].tolist()
    own = read_tensors(path)
    assert own.metadata == {"step": "7"}
    assert {tensor.name for tensor in own.tensors} == set(arrays)
    assert not list(tmp_path.glob("*.partial"))


def make_training():
    """A model with frozen parts, buffers and two parameter groups, after two steps of AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}])
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_optimizer_state_stands_under_its_parameter(tmp_path):
    model, optimizer = make_training()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    found = by_name(tmp_path / "a.pt")
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert_equal(found[f"optimizer/{name}/{key}"], optimizer.state[parameter][key])
    assert {tensor.section for tensor in found.values()} == {"model", "optimizer"}


def test_a_doubtful_parameter_keeps_its_number(tmp_path):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    optimizer = torch.optim.Adam(model[2].parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    checkpoint = read_checkpoint(tmp_path / "a.pt")
    states = [tensor.name for tensor in checkpoint.tensors if tensor.section == "optimizer"]
    assert states[1] == "optimizer/#0/exp_avg"
    (note,) = checkpoint.notes
    assert note.startswith("optimizer: the state of 2 parameters stands under its number (#0, #1, …)")


def test_names_written_by_the_optimizer_win(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(list(model[1].named_parameters(prefix="1")))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    assert "optimizer/1.weight/exp_avg" in by_name(tmp_path / "a.pt")


def test_two_optimizers_stand_apart(tmp_path):
    model, optimizer = make_training()
    saved = {"net": model.state_dict(), "opt_g": optimizer.state_dict(), "opt_d": optimizer.state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    names = set(by_name(tmp_path / "a.pt"))
    assert {"0.weight", "opt_g/0.weight/exp_avg", "opt_d/0.weight/exp_avg"} <= names


def test_lightning_checkpoint(tmp_path):
    class Module(L.LightningModule):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

        def training_step(self, batch, _):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, accelerator="cpu", default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, data)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = read_checkpoint(tmp_path / "a.ckpt")
    names = [tensor.name for tensor in checkpoint.tensors]
    assert names[:2] == ["layer.weight", "layer.bias"]
    assert "optimizer/layer.weight/exp_avg" in names
    assert checkpoint.values["global_step"] == 2
    assert checkpoint.values["hyper_parameters.width"] == 4


def save_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = list(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_folder_with_the_optimizer_beside_it(tmp_path):
    model, optimizer = make_training()
    save_shards(tmp_path, model.state_dict())
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = by_name(path)
        for name, tensor in model.state_dict().items():
            assert_equal(found[name], tensor)
    found = by_name(tmp_path)
    momentum = optimizer.state[model[0].weight]["exp_avg"]
    assert_equal(found["optimizer/0.weight/exp_avg"], momentum)
    # The file sorts by name, so the order of equal shapes is lost: 2.bias could be any of these.
    assert "optimizer/#6/exp_avg" in found
    assert "optimizer/2.bias/exp_avg" not in found


def test_transformers_folder(tmp_path):
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16
    )
    model = transformers.BertModel(config)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(tmp_path)
    found = by_name(tmp_path)
    for name, tensor in model.state_dict().items():
        assert_equal(found[name], tensor, limit=100)


def save_distributed(folder: Path, tree) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)


def test_distributed_folder(tmp_path):
    model, optimizer = make_training()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 12}
    save_distributed(tmp_path / "c", tree)
    checkpoint = read_checkpoint(tmp_path / "c")
    found = {tensor.name: tensor for tensor in checkpoint.tensors}
    for name, tensor in model.state_dict().items():
        assert_equal(found[name], tensor)
    assert_equal(found["optimizer/0.weight/exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert checkpoint.values["step"] == 12
    assert checkpoint.format == "distributed"


def test_distributed_shards_of_two_ranks_are_joined(tmp_path):
    shutil.copytree(Path(__file__).parent / "data" / "sharded", tmp_path / "saved")
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    found = by_name(tmp_path / "saved")
    assert len(found["rows"].parts) == len(found["columns"].parts) == 2
    assert_equal(found["rows"], whole)
    assert_equal(found["columns"], whole.bfloat16())
    assert_equal(found["all"], whole)
    next((tmp_path / "saved").glob("__1_*.distcp")).unlink()
    with pytest.raises(CheckpointBroken, match="No such file"):
        read_checkpoint(tmp_path / "saved")


def test_a_folder_of_one_file_and_a_folder_of_many(tmp_path):
    torch.save({"x": torch.ones(1)}, tmp_path / "only.pt")
    assert "x" in by_name(tmp_path)
    torch.save({"x": torch.ones(1)}, tmp_path / "second.pt")
    with pytest.raises(CheckpointBroken, match=r"name one of its files: only.pt, second.pt"):
        read_checkpoint(tmp_path)


def test_reading_needs_no_torch(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "a.pt")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from clew.store.checkpoint import read_checkpoint\n"
        f"print(read_checkpoint(Path({str(tmp_path / 'a.pt')!r})).tensors[0].load().sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3.0\n"
