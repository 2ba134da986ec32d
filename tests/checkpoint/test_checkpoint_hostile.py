"""Damaged and malicious files: a clear error, nothing executed, no memory taken that the file does not have."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint as dcp

from clew.cli import main
from clew.errors import CheckpointBroken, CheckpointUntrusted, ClewError
from clew.store import checkpoint_tree
from clew.store.checkpoint import read_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


class Marker:
    """Pickles to a call of any function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def write_archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, **options) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/byteorder", "little")
        for key, data in (storages or {}).items():
            archive.writestr(f"a/data/{key}", data)
    return path


def pickle_tensor(*, key="0", numel=4, offset=0, shape=(4,), strides=(1,), dtype="FloatStorage") -> bytes:
    """The program that torch writes for one tensor, with any numbers in it."""

    class Storage:
        pass

    class Writer(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", Type, key, "cpu", numel) if isinstance(value, Storage) else None

        def reducer_override(self, value):
            return NotImplemented

    Type = getattr(torch, dtype)
    file = io.BytesIO()
    call = Marker(torch._utils._rebuild_tensor_v2, Storage(), offset, shape, strides, False, OrderedDict())
    Writer(file, protocol=2).dump({"x": call})
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("function", [os.system, eval, exec, os.remove, pickle.loads, getattr, __import__])
def test_a_call_in_the_pickle_is_refused_by_name_and_not_made(tmp_path, function, protocol):
    witness = tmp_path / "witness"
    witness.touch()
    bomb = pickle.dumps({"x": Marker(function, f"rm {witness}")}, protocol=protocol)
    path = write_archive(tmp_path / "a.pt", bomb)
    with pytest.raises(CheckpointUntrusted) as caught:
        read_checkpoint(path)
    assert f".{function.__name__}'" in caught.value.what
    assert "--trust" in caught.value.next_step
    assert caught.value.where == str(path)
    assert witness.exists()


def test_names_in_a_file_cannot_write_on_the_terminal(tmp_path, capsys):
    program = b"\x80\x02cos\x1b[2J\nsystem\n."
    with pytest.raises(CheckpointUntrusted) as caught:
        read_checkpoint(write_archive(tmp_path / "a.pt", program))
    assert "'os?[2J.system'" in str(caught.value)
    torch.save({"x\x1b[2J": torch.ones(2)}, tmp_path / "b.pt")
    assert main(["ckpt", "show", str(tmp_path / "b.pt")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_whole_module_is_refused_with_its_class(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(CheckpointUntrusted, match=r"import and run 'torch.nn.modules.linear.Linear'"):
        read_checkpoint(tmp_path / "a.pt")


def test_setting_state_on_a_function_is_refused(tmp_path):
    program = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}U\x01kK\x01sb."
    with pytest.raises(CheckpointBroken, match="damaged near byte"):
        read_checkpoint(write_archive(tmp_path / "a.pt", program))


@pytest.mark.parametrize("program", [b"I1\n.", b"\x82\x01.", b"(ios\nsystem\n.", b"(cos\nsystem\no."])
def test_instructions_outside_the_list_are_refused(tmp_path, program):
    with pytest.raises(CheckpointUntrusted):
        read_checkpoint(write_archive(tmp_path / "a.pt", program))


def test_old_formats_are_refused_with_the_reason(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointUntrusted, match=r"a bare pickle, as torch wrote before 1.6") as caught:
        read_checkpoint(tmp_path / "old.pt")
    assert "--trust" in caught.value.next_step
    with tarfile.open(tmp_path / "older.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(CheckpointUntrusted, match="it is a tar"):
        read_checkpoint(tmp_path / "older.pt")
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(CheckpointUntrusted, match="an array of Python objects"):
        read_checkpoint(tmp_path / "o.npy")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shape": (10**12,), "strides": (1,)}, "needs 4,000,000,000,000 bytes of a storage of 16"),
        ({"shape": (10**12,), "strides": (0,)}, "repeats 1 stored elements 1,000,000,000,000 times over"),
        ({"shape": (10**8,) * 6, "strides": (0,) * 6}, "times over"),
        ({"shape": (-4,)}, "impossible shape"),
        ({"shape": (2.5,)}, "impossible shape"),
        ({"shape": (1,) * 100, "strides": (1,) * 100}, "100 dimensions"),
        ({"strides": (-1,)}, "impossible strides"),
        ({"strides": (1, 1)}, "impossible strides"),
        ({"offset": -1}, "impossible strides"),
        ({"offset": 2}, "needs 24 bytes of a storage of 16"),
        ({"key": "7"}, "lacks the storage 'data/7'"),
        ({"key": "../../../etc/passwd"}, "lacks the storage"),
        ({"numel": 10**15}, "should hold 4,000,000,000,000,000 bytes and holds 16"),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage(tmp_path, settings, text):
    path = write_archive(tmp_path / "a.pt", pickle_tensor(**settings), {"0": bytes(16)})
    with pytest.raises(CheckpointBroken) as caught:
        read_checkpoint(path)
    assert text in caught.value.what


def test_memory_for_a_huge_memo_index_is_not_taken(tmp_path):
    program = b"\x80\x02}r\xff\xff\xff\xff."
    tracemalloc.start()
    assert read_checkpoint(write_archive(tmp_path / "a.pt", program)).tensors == ()
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_containers_that_hold_themselves_or_grow_without_end(tmp_path, monkeypatch):
    loop: dict = {}
    loop["again"] = loop
    with pytest.raises(CheckpointBroken, match="nested more than 64 deep"):
        read_checkpoint(write_archive(tmp_path / "loop.pt", pickle.dumps(loop, protocol=2)))
    shared: list = [{"x": 1}]
    for _ in range(40):
        shared = [shared, shared]
    monkeypatch.setattr(checkpoint_tree, "MAX_NODES", 50_000)
    with pytest.raises(CheckpointBroken, match="hold more than 50,000 things"):
        read_checkpoint(write_archive(tmp_path / "laugh.pt", pickle.dumps(shared, protocol=2)))


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
        b"\x80\x02)" + b"\x85" * 300_000 + b".",
        b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02.",
        b"",
        b"\x80\x02X\xff\xff\xff\x7fabc.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02cbuiltins\ncomplex\n)R}b.",
        b"\x80\x02h\x05.",
        b"\x80\x02}K\x01K\x02K\x03e.",
    ],
)
def test_nonsense_programs(tmp_path, program):
    with pytest.raises((CheckpointBroken, CheckpointUntrusted)):
        read_checkpoint(write_archive(tmp_path / "a.pt", program))


def test_nested_rebuilds_do_not_exhaust_the_stack(tmp_path):
    head = b"ctorch._tensor\n_rebuild_from_type_v2\n"
    # f(f, None, (f, None, (…), None), None), built from the inside out
    program = b"\x80\x02" + head + b"q\x000)" + b"q\x01(h\x00Nh\x01Nt" * 5000
    program += b"q\x010h\x00h\x01R."
    with pytest.raises(CheckpointBroken, match="damaged"):
        read_checkpoint(write_archive(tmp_path / "a.pt", program))


def save_plain(path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({"w": torch.randn(40, 50), "b": torch.randn(50)}, path)
    return path


def test_a_truncated_archive(tmp_path):
    whole = save_plain(tmp_path / "a.pt").read_bytes()
    for share in (0.999, 0.9, 0.5, 0.1):
        cut = tmp_path / "cut.pt"
        cut.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(CheckpointBroken, match="damaged or cut off"):
            read_checkpoint(cut)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = save_plain(tmp_path / "a.pt")
    tensor = read_checkpoint(path).tensors[0]
    os.truncate(path, 2000)
    with pytest.raises(CheckpointBroken, match="ends before the data"):
        tensor.load()
    path.unlink()
    with pytest.raises(CheckpointBroken, match="cannot open the file: No such file"):
        tensor.load()


def test_compressed_overlapping_and_climbing_entries(tmp_path):
    program = pickle_tensor()
    path = write_archive(tmp_path / "z.pt", program, {"0": bytes(16)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointBroken, match=r"is compressed, which torch.save never does"):
        read_checkpoint(path)
    path = write_archive(tmp_path / "l.pt", program, {"0": bytes(16)}, compression=zipfile.ZIP_LZMA)
    with pytest.raises(CheckpointBroken, match="packed with method 14"):
        read_checkpoint(path)
    path = write_archive(tmp_path / "c.pt", program, {"../../x": bytes(16)})
    with pytest.raises(CheckpointBroken, match="leads outside the archive"):
        read_checkpoint(path)


def test_two_entries_over_the_same_bytes(tmp_path):
    path = write_archive(tmp_path / "o.pt", pickle_tensor(), {"0": bytes(16), "1": bytes(16)})
    data = bytearray(path.read_bytes())
    places = [i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02"]
    first, second = places[2], places[3]
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    with pytest.raises(CheckpointBroken, match="overlap"):
        read_checkpoint(path)


@pytest.mark.parametrize("kind", ["pt", "npz", "safetensors", "npy"])
def test_random_damage_never_crashes(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    arrays = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.ones(3)}
    if kind == "pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    elif kind == "safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, path)
    elif kind == "npz":
        np.savez_compressed(path, **arrays)
    else:
        np.save(path, arrays["w"])
    whole = path.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 2, 8))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            data = data[: chance.randrange(len(data))]
        path.write_bytes(data)
        try:
            for tensor in read_checkpoint(path).tensors:
                for block in tensor.blocks(16):
                    assert len(block) <= 16
        except ClewError as error:
            assert error.what


def write_header(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"x": ENTRY | {"shape": [10**12]}}, "needs 4,000,000,000,000 bytes, the file has 8"),
        ({"x": ENTRY | {"shape": [-2]}}, "impossible shape"),
        ({"x": ENTRY | {"shape": ["2"]}}, "impossible shape"),
        ({"x": ENTRY | {"shape": [1] * 50 + [2]}}, "51 dimensions"),
        ({"x": ENTRY | {"dtype": "F33"}}, "unknown element type F33"),
        ({"x": ENTRY | {"data_offsets": [8, 0]}}, "impossible data_offsets"),
        ({"x": ENTRY | {"data_offsets": [0]}}, "lacks dtype, shape or data_offsets"),
        (
            {"x": ENTRY | {"data_offsets": [16, 24]}},
            "should hold 24 bytes of data and holds 8: it is cut off",
        ),
        ({"x": ENTRY, "y": ENTRY}, "the data of 'x' and 'y' overlap"),
        ({"x": 5}, "lacks dtype"),
        ([], "its header is not a table"),
        (b"[" * 100_000, "its header cannot be read"),
        (b'{"x":1,"x":2}', "a name appears twice"),
        (b"{\xff}", "its header cannot be read"),
        ({"__metadata__": []}, "metadata is not a table"),
    ],
)
def test_bad_safetensors_headers(tmp_path, header, text):
    with pytest.raises(CheckpointBroken) as caught:
        read_checkpoint(write_header(tmp_path / "a.safetensors", header, bytes(8)))
    assert text in caught.value.what


def test_a_header_length_that_would_fill_the_memory(tmp_path):
    tracemalloc.start()
    for length in (2**63, 10**12, 1000):
        path = write_header(tmp_path / "a.safetensors", {"x": ENTRY}, bytes(8), length=length)
        with pytest.raises(CheckpointBroken, match=f"its header claims {length:,} bytes in a file of"):
            read_checkpoint(path)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", "..", "sub/a.safetensors"])
def test_an_index_that_leads_outside(tmp_path, target):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": target}}))
    with pytest.raises(CheckpointBroken, match="the index leads outside its folder"):
        read_checkpoint(tmp_path)


def test_a_missing_shard_and_a_missing_tensor(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "one.safetensors", "y": "one.safetensors"}}))
    with pytest.raises(CheckpointBroken, match="no such file") as caught:
        read_checkpoint(tmp_path)
    assert caught.value.where.endswith("one.safetensors")
    write_header(tmp_path / "one.safetensors", {"x": ENTRY}, bytes(8))
    with pytest.raises(CheckpointBroken, match="names 1 tensors that no shard holds, 'y' first"):
        read_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointBroken, match="the index cannot be read"):
        read_checkpoint(tmp_path)


def test_distributed_metadata_is_not_executed_and_not_followed_outside(tmp_path):
    folder = tmp_path / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    metadata = (folder / ".metadata").read_bytes()
    outside = metadata.replace(b"__0_0.distcp", b"../../secret")
    (folder / ".metadata").write_bytes(outside)
    with pytest.raises(CheckpointBroken, match="leads outside the folder"):
        read_checkpoint(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Marker(os.system, "true")))
    with pytest.raises(CheckpointUntrusted, match=r"system"):
        read_checkpoint(folder)
    (folder / ".metadata").write_bytes(metadata)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointBroken, match="cannot read the file: No such file"):
        read_checkpoint(folder)


def test_files_that_are_no_checkpoints(tmp_path):
    for content, text in (
        (b"", "the file is empty"),
        (b"hello world, this is text", "not a checkpoint; it starts with b'hello wo'"),
        (b"PK\x05\x06" + bytes(18), "an empty archive"),
    ):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(CheckpointBroken) as caught:
            read_checkpoint(tmp_path / "a")
        assert text in caught.value.what
    with pytest.raises(CheckpointBroken, match="no such file or folder"):
        read_checkpoint(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointBroken, match="not a regular file"):
        read_checkpoint(tmp_path / "pipe")


def test_an_npz_that_unpacks_to_more_or_less_than_it_says(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10,)})
    for count in (4, 400):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("x.npy", header.getvalue() + bytes(count))
        with pytest.raises(CheckpointBroken, match=f"needs 40 bytes, the file has {count}"):
            read_checkpoint(tmp_path / "a.npz")
