"""Pictures, figures and histograms into the run; the recording that is going on; PNG files."""

import json
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from fake_session import FakeSession, recording

import clew
from clew.capture import current
from clew.model.png import encode_png


def decode(data):
    """Return the pixels of a PNG file, checksums looked at: a plain twin of the encoder."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        name, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + body)
        chunks[name] = body
        at += 12 + size
    assert list(chunks)[-1] == b"IEND"
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert depth == 8
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def drawn(image):
    with recording() as session:
        assert clew.log_image("picture", image) is True
    ((name, data, suffix),) = session.media
    assert (name, suffix) == ("picture", ".png")
    return decode(data)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_holds_its_pixels(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    data = encode_png(pixels.tobytes(), width=7, height=5, channels=channels)
    assert np.array_equal(decode(data), pixels)


@pytest.mark.parametrize("size", [(7, 5, 2), (6, 5, 1), (0, 0, 1)])
def test_a_png_of_the_wrong_size_is_refused(size):
    width, height, channels = size
    with pytest.raises(ValueError, match="are not"):
        encode_png(b"" if not width else bytes(35), width=width, height=height, channels=channels)


def test_shapes_of_pictures():
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(drawn(grey)[:, :, 0], grey)
    colour = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    assert np.array_equal(drawn(colour), colour)
    assert np.array_equal(drawn(torch.tensor(colour).permute(2, 0, 1)), colour)
    assert np.array_equal(drawn(torch.tensor(grey)[None])[:, :, 0], grey)
    # Both ends could be the channels: tensors have them first, arrays last.
    both = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    assert drawn(both).shape == (3, 4, 3)
    assert drawn(torch.tensor(both)).shape == (4, 3, 3)


def test_a_batch_is_drawn_as_a_grid():
    batch = torch.ones(5, 1, 2, 3)
    assert drawn(batch).shape == (5, 11, 1)
    assert drawn(batch)[0, :, 0].tolist() == [255, 255, 255, 0, 255, 255, 255, 0, 255, 255, 255]


def test_numbers_become_shades():
    assert drawn(torch.tensor([[0.0, 0.5, 1.0]]))[0, :, 0].tolist() == [0, 128, 255]
    assert drawn(torch.tensor([[0.0, 0.5]]))[0, :, 0].tolist() == [0, 128]
    assert drawn(torch.tensor([[-1.0, 0.0, 1.0]]))[0, :, 0].tolist() == [0, 128, 255]
    assert drawn(torch.tensor([[10, 20]]))[0, :, 0].tolist() == [0, 255]
    assert drawn(torch.tensor([[True, False]]))[0, :, 0].tolist() == [255, 0]
    assert drawn(torch.full((1, 2), 7.0))[0, :, 0].tolist() == [0, 0]
    assert drawn(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16, requires_grad=True))[0, 1, 0] == 255


def test_bad_numbers_are_magenta():
    pixels = drawn(torch.tensor([[0.0, float("nan"), 1.0, float("inf")]]))
    assert pixels[0].tolist() == [[0, 0, 0], [255, 0, 255], [255, 255, 255], [255, 0, 255]]


def test_pictures_of_others_are_taken_as_they_are():
    data = encode_png(b"\x05", width=1, height=1, channels=1)
    assert drawn(data)[0, 0, 0] == 5

    class Picture:
        mode = "L"

        def save(self, stream, format):
            assert format == "PNG"
            stream.write(data)

    assert drawn(Picture())[0, 0, 0] == 5


@pytest.mark.parametrize(
    ("image", "what"),
    [
        (torch.zeros(2, 5, 7), "float32[2, 5, 7] is not a picture"),
        (torch.zeros(7), "float32[7] is not a picture"),
        (torch.zeros(0, 3), "float32[0, 3] is not a picture"),
        (b"GIF89a", "these bytes are not a PNG file"),
        (
            torch.zeros(2, 2, device="meta"),
            "float32[2, 2] meta cannot be drawn: it has a shape but no values",
        ),
        (torch.zeros(2, 2) + 1j, "complex numbers have no place on one axis"),
        ("x.png", "expected a tensor, an array or a number, got a str"),
    ],
)
def test_what_is_no_picture_is_refused(image, what):
    with recording(), pytest.raises(clew.ClewError) as caught:
        clew.log_image("x", image)
    assert caught.value.what == what


def test_a_figure_is_drawn_by_its_own_means():
    class Figure:
        def savefig(self, stream, format, dpi):
            stream.write(f"{format} {dpi}".encode())

    class Axes:
        figure = Figure()

    class Shown:
        def _repr_png_(self):
            return b"shown"

    with recording() as session:
        assert clew.log_figure("loss", Figure(), dpi=50)
        assert clew.log_figure("axes", Axes())
        assert clew.log_figure("shown", Shown())
        with pytest.raises(clew.ClewError, match="cannot draw a list"):
            clew.log_figure("x", [])
    assert session.media == [
        ("loss", b"png 50", ".png"),
        ("axes", b"png 100", ".png"),
        ("shown", b"shown", ".png"),
    ]


def test_a_histogram_counts_the_finite_elements():
    x = torch.tensor([0.0, 1.0, 1.0, 4.0, float("nan"), float("inf")])
    with recording() as session:
        assert clew.log_histogram("w", x, bins=4)
        assert clew.log_histogram("empty", np.empty(0))
    kind, note = session.notes[0]
    assert kind == "histogram"
    assert note["name"] == "w"
    assert note["counts"] == [1, 2, 0, 1]
    assert note["edges"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert note["stats"]["nan"] == 1
    assert sum(session.notes[1][1]["counts"]) == 0
    json.dumps(session.notes, allow_nan=False)


def test_a_histogram_that_cannot_be_is_refused():
    with pytest.raises(clew.ClewError, match="cannot have 0 bins"):
        clew.log_histogram("w", torch.ones(2), bins=0)
    with recording(), pytest.raises(clew.ClewError, match="has no histogram"):
        clew.log_histogram("w", torch.ones(2, device="meta"))


def test_without_a_run_nothing_is_kept_and_that_is_said_once(capsys):
    for _ in range(2):
        assert clew.log_image("x", "not even a picture") is False
        assert clew.log_histogram("x", None) is False
        assert clew.log_figure("x", None) is False
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "clew.log_image",
        "clew.log_histogram",
        "clew.log_figure",
    ]
    assert "nothing is being recorded" in lines[0]


def test_the_run_of_this_thread_comes_first():
    mine, theirs = FakeSession(), FakeSession()
    seen = []

    def other():
        seen.append(current.active())
        current.push(theirs)
        seen.append(current.active())
        current.pop(theirs)

    assert current.active() is None
    current.push(mine)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert current.active() is mine
    current.pop(theirs)
    current.pop(mine)
    current.pop(mine)
    assert current.active() is None
    assert seen == [mine, theirs]


def test_into_a_real_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with clew.watch(net, optimizer, out=str(tmp_path / "runs"), status=False) as watch:
        for _ in range(2):
            clew.check.less(net(torch.ones(1, 2)), -100, "out", warn=True).sum().backward()
            optimizer.step()
            clew.log_image("weights", net.weight)
            clew.log_histogram("weights", net.weight, bins=3)
    monkeypatch.undo()
    notes = [json.loads(line) for line in next(watch.path.rglob("notes.jsonl")).read_text().splitlines()]
    assert {note["kind"] for note in notes} >= {"check", "histogram", "media"}
    checks = [note for note in notes if note["kind"] == "check"]
    assert [(note["step"], note["count"]) for note in checks] == [(0, 2), (1, 2)]
    pictures = sorted(watch.path.rglob("*.png"))
    assert len(pictures) == 2
    assert decode(pictures[0].read_bytes()).shape == (2, 2, 1)
