"""Filters, activations and histograms as pictures, and what is strange about them."""

import numpy as np
import pytest
import torch
from test_picture_formats import decode_png
from torch import nn

import clew
from clew.errors import TraceFailed, UsageError
from clew.render.canvas import Canvas
from clew.render.stroke_font import draw_letter, letter_strokes
from clew.views.color_map import BAD, choose_scale, colorize, shrink
from clew.views.image_grid import grid_of_activations, grid_of_filters
from clew.views.text_width import measure_text

MAGENTA = np.array(BAD)


def has_magenta(picture):
    return bool((decode_png(picture.png) == MAGENTA).all(axis=-1).any())


def test_filters_of_three_inputs_are_shown_in_colour_one_tile_each():
    weight = np.zeros((5, 3, 2, 2))
    weight[0, 0], weight[1, 1], weight[2, 2] = 1, 1, 1
    weight[3] = -1
    grid = grid_of_filters(weight, "conv1")
    tiles = [tile for row in grid.rows for tile in row]
    assert [tile.label for tile in tiles] == ["0", "1", "2", "3", "4"]
    assert tiles[0].pixels[0, 0].tolist() == [255, 128, 128]
    assert tiles[1].pixels[0, 0].tolist() == [128, 255, 128]
    assert tiles[3].pixels[0, 0].tolist() == [0, 0, 0]
    assert grid.notes == ("red, green and blue: the 3 inputs, from -1 to 1",)


def test_other_filters_have_a_row_for_each_output_and_a_tile_for_each_input():
    grid = grid_of_filters(np.random.default_rng(0).normal(size=(40, 20, 3, 3)), "conv2")
    assert len(grid.rows) == 4
    assert {len(row) for row in grid.rows} == {16}
    assert grid.labels[:2] == ("out 0", "out 1")
    assert grid.scale.ramp == "diverging"
    assert grid.notes == ("4 of 40 filters", "16 of 20 inputs")


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 4, 5),
        nn.Conv2d(3, 8, 7),
        nn.Conv2d(1, 6, 3),
        nn.Conv3d(1, 2, 3),
        nn.Linear(6, 4),
        nn.LayerNorm(5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_any_layer_with_weights_is_drawn(layer, tmp_path):
    picture = clew.filters(layer)
    assert picture.arrays["weight"].shape == tuple(layer.weight.shape)
    pixels = decode_png(picture.save(tmp_path / "filters.png").read_bytes())
    assert len(np.unique(pixels)) > 3


def test_a_constant_picture_divides_nothing_by_zero():
    for value in (0.0, 3.0, -2.0, 1e30):
        decode_png(clew.filters(torch.full((4, 3, 3, 3), value)).png)
        decode_png(clew.filters(torch.full((4, 2, 3, 3), value)).png)
        decode_png(clew.histogram(torch.full((8,), value)).png)


def test_what_is_not_finite_is_magenta_and_nothing_else_is():
    weight = torch.randn(4, 2, 3, 3)
    assert not has_magenta(clew.filters(weight))
    weight[1, 1, 0, 0] = float("nan")
    assert has_magenta(clew.filters(weight))
    weight[1, 1, 0, 0] = float("inf")
    assert has_magenta(clew.filters(weight))
    assert has_magenta(clew.filters(torch.full((2, 2, 3, 3), float("nan"))))


def test_colours_follow_the_numbers():
    values = np.array([[-2.0, 0.0, 2.0, np.nan]])
    scale = choose_scale(values)
    assert (scale.ramp, scale.low, scale.high, scale.has_bad) == ("diverging", -2, 2, True)
    left, middle, right, bad = colorize(values, scale)[0].astype(int)
    assert left[2] > left[0]
    assert right[0] > right[2]
    assert middle.min() > 240
    assert bad.tolist() == list(BAD)
    ramp = colorize(np.linspace(0, 1, 9)[None], choose_scale(np.array([0.0, 1.0])))[0].sum(axis=-1)
    assert (np.diff(ramp.astype(int)) < 0).all()


def test_a_large_table_is_averaged_and_says_so():
    values = np.arange(24.0).reshape(4, 6)
    small, block = shrink(values, 3)
    assert block == 2
    assert small.tolist() == [[3.5, 5.5, 7.5], [15.5, 17.5, 19.5]]
    odd, _ = shrink(np.ones((5, 3)), 3)
    assert odd.tolist() == [[1, 1], [1, 1], [1, 1]]
    grid = grid_of_activations(np.zeros((2, 1200, 600)), "big")
    assert max(tile.pixels.shape[0] for row in grid.rows for tile in row) <= 512
    assert "each pixel is the mean of 3 × 3 values" in grid.notes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.bn(self.conv(x))
        return {"logits": self.head(x.mean((2, 3)))}


def test_activations_are_what_the_site_gave_and_the_model_is_as_before():
    torch.manual_seed(0)
    model, x = Net().train(), torch.randn(2, 3, 10, 10)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    picture = clew.activations(model, x, "conv", sample=1)
    np.testing.assert_array_equal(picture.arrays["output"], model.conv(x).detach().numpy())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not model.conv._forward_hooks
    assert clew.activations(model, (x,), "head").arrays["output"].shape == (2, 4)
    assert clew.activations(model, {"x": x}, "").arrays["output"].shape == (2, 4)


def test_activations_of_what_is_not_there_say_so():
    model, x = Net(), torch.randn(2, 3, 10, 10)
    with pytest.raises(UsageError) as caught:
        clew.activations(model, x, "cnv")
    assert str(caught.value) == "no site 'cnv' in Net\n  next:  did you mean 'conv'?"
    with pytest.raises(UsageError, match="there is no sample 2"):
        clew.activations(model, x, "conv", sample=2)
    with pytest.raises(TraceFailed, match="conv2d in 'conv' raised RuntimeError") as failed:
        clew.activations(model, torch.randn(2, 4, 10, 10), "conv")
    assert "expects 3 channels and got 4" in failed.value.next_step


def test_a_histogram_counts_what_is_finite_and_tells_the_rest():
    x = torch.tensor([-1.0, 0.0, 0.0, 1.0, float("nan"), float("inf"), float("-inf")])
    picture = clew.histogram(x, "w", bins=4)
    assert picture.arrays["counts"].tolist() == [1, 0, 2, 1]
    assert picture.arrays["edges"].tolist() == [-1, -0.5, 0, 0.5, 1]
    assert decode_png(picture.png).shape[1] > 800
    assert repr(picture) == "<Picture w: counts (4,), edges (5,)>"


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_every_dtype_has_a_histogram(dtype):
    assert clew.histogram(torch.ones(3, 4).to(dtype)).arrays["counts"].sum() == 12


def test_nothing_and_nothing_finite_have_histograms():
    assert clew.histogram(torch.empty(0)).arrays["counts"].sum() == 0
    assert clew.histogram(torch.full((3,), float("nan"))).arrays["counts"].sum() == 0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: clew.histogram(torch.ones(2), bins=0), "a histogram cannot have 0 bins"),
        (lambda: clew.histogram(torch.ones(2, dtype=torch.complex64)), "complex numbers cannot be drawn"),
        (lambda: clew.filters(torch.ones(2, 2, device="meta")), "a tensor on the meta device has no values"),
        (lambda: clew.filters(nn.ReLU()), "a ReLU has no weights to draw"),
        (lambda: clew.filters(torch.ones(0, 3, 2, 2)), "there is nothing to draw: the shape is (0, 3, 2, 2)"),
        (lambda: clew.filters(np.array(["a"])), "<U1 values cannot be drawn"),
        (lambda: clew.histogram(torch.ones(2)).save("a.jpg"), "this picture is saved as PNG"),
        (lambda: clew.histogram(torch.ones(2)).save("no/where.png"), "cannot write the picture"),
    ],
)
def test_what_cannot_be_drawn_says_why(call, text):
    with pytest.raises(UsageError) as caught:
        call()
    assert text in str(caught.value)
    assert caught.value.next_step


def test_pictures_go_into_the_run(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    picture = clew.filters(model)
    with clew.watch(model, optimizer, out=str(tmp_path)):
        model(torch.randn(2, 3)).sum().backward()
        assert picture.log("weights")
        optimizer.step()
    (path,) = (each for each in tmp_path.rglob("*.png"))
    assert path.read_bytes() == picture.png


def test_every_letter_on_a_keyboard_has_strokes_of_its_own():
    letters = [chr(code) for code in range(33, 127)] + list("×·…→µ–±²")
    drawn = {letter: repr(letter_strokes(letter)) for letter in letters}
    boxes = [letter for letter in letters if drawn[letter] == repr(letter_strokes("☃"))]
    assert boxes == []
    same = {}
    for letter, strokes in drawn.items():
        same.setdefault(strokes, []).append(letter)
    assert [group for group in same.values() if len(group) > 1] == [["-", "–"], ["0", "O"]]
    assert all(draw_letter(letter, 20).max() > 0.6 for letter in letters)


def test_text_covers_the_width_that_was_measured():
    canvas = Canvas(400, 60, "#ffffff")
    canvas.write(10, 40, "Conv2d weight 64×3", size=26, color="#000000", bold=True)
    columns = np.flatnonzero((canvas.pixels < 128).any(axis=(0, 2)))
    width = measure_text("Conv2d weight 64×3", 26, bold=True)
    assert columns[0] >= 10
    assert width * 0.93 <= columns[-1] - 10 <= width


def test_what_hangs_over_the_edge_is_cut_off():
    canvas = Canvas(20, 20, "#ffffff")
    canvas.fill_rect(-5, -5, 12, 30, color="#ff0000", radius=4)
    canvas.draw_line([(-10, 10), (40, 10)], width=2, color="#0000ff")
    canvas.write(-8, 30, "wide text", size=14, color="#000000")
    canvas.paste(np.zeros((9, 9, 3), np.uint8), 15, 15)
    assert canvas.pixels.shape == (20, 20, 3)
    assert canvas.pixels[2, 2].tolist() == [255, 0, 0]
    assert canvas.pixels[10, 19].tolist() == [0, 0, 255]
    assert canvas.pixels[19, 19].tolist() == [0, 0, 0]
