"""The page in a real browser: opening, closing, searching, and the same layout as the picture made in Python."""

import shutil

import pytest
from synthetic_graph import nested, residual, transformer

from clew.api import picture
from clew.views.graph_card import Cards
from clew.views.graph_color import choose_coloring
from clew.views.graph_layout import Layout
from clew.views.graph_tree import build_tree, opened_keys

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Return a function that shows a graph; it fails the test for any error or request of the page."""
    pages, problems = [], []

    def show(graph, *, dark=False, **options):
        path = picture.save(graph, tmp_path / "graph.html", **options)
        page = browser.new_page(
            viewport={"width": 1200, "height": 800}, color_scheme="dark" if dark else "light"
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on(
            "request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None
        )
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield show
    for page in pages:
        page.close()
    assert problems == []


def box(page, title):
    return page.locator(f'[data-box][aria-label^="{title} "], [data-box][aria-label="{title}"]')


def count(page):
    return page.locator("[data-box]").count()


def test_a_click_opens_a_module_and_a_click_on_its_header_closes_it(open_page):
    page = open_page(transformer(12))
    before = count(page)
    assert box(page, "attn").count() == 0
    box(page, "h.0").click()
    assert box(page, "h.0").get_attribute("aria-expanded") == "true"
    assert count(page) == before + 6
    assert box(page, "attn").count() == 1
    box(page, "h.0").click(position={"x": 20, "y": 200})
    assert count(page) == before + 6, "a click inside an open module must not close it"
    box(page, "h.0").click(position={"x": 20, "y": 10})
    assert count(page) == before


def test_the_box_stays_where_it_was_clicked(open_page):
    page = open_page(transformer(12))
    before = box(page, "h.3").bounding_box()
    box(page, "h.3").click()
    after = box(page, "h.3").bounding_box()
    assert after["y"] == pytest.approx(before["y"], abs=6)
    middle = [place["x"] + place["width"] / 2 for place in (before, after)]
    assert middle[1] == pytest.approx(middle[0], abs=6)


def test_details_tell_arguments_shapes_line_and_statistics(open_page):
    m = residual(1)
    page = open_page(m, depth=2)
    box(page, "conv1").first.click()
    text = page.locator("#details").inner_text()
    for part in ("conv2d", "stride", "(1, 1)", "4×3×32×32", "conv1.weight", "model.py:1", "needs grad"):
        assert part in text


def test_search_finds_reveals_and_goes_on(open_page):
    page = open_page(transformer(12))
    page.keyboard.press("/")
    page.keyboard.type("h.7 c_proj")
    assert page.locator("#count").inner_text() == "2 found"
    page.keyboard.press("Enter")
    assert page.locator("#count").inner_text() == "1 of 2"
    assert page.locator(".selected").get_attribute("aria-label") == "c_proj linear"
    assert "h.7.attn.c_proj" in page.locator("#details").inner_text()
    place = page.locator(".selected").bounding_box()
    assert 0 < place["y"] < 800, "what was found is out of sight"
    page.keyboard.press("Enter")
    assert "h.7.mlp.c_proj" in page.locator("#details").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#count").inner_text() == ""
    page.keyboard.press("/")
    page.keyboard.type("no such thing")
    assert "nothing found" in page.locator("#details").inner_text()


def test_a_line_tells_its_tensor(open_page):
    page = open_page(residual(1), depth=1)
    page.locator(".grip").nth(2).dispatch_event("click")
    assert "bn1" in page.locator("#details").inner_text()
    assert page.locator(".wire.lit").count() >= 1


def test_keys_open_levels_zoom_and_move(open_page):
    page = open_page(transformer(2), depth=1)
    before = count(page)
    page.keyboard.press("e")
    opened = count(page)
    assert opened > before
    page.keyboard.press("c")
    assert count(page) == before
    transform = page.locator("#world").get_attribute("transform")
    page.keyboard.press("+")
    page.keyboard.press("ArrowDown")
    assert page.locator("#world").get_attribute("transform") != transform
    box(page, "h.1").focus()
    page.keyboard.press("Enter")
    assert box(page, "h.1").get_attribute("aria-expanded") == "true"
    assert page.evaluate("document.activeElement.dataset.box") == box(page, "h.1").get_attribute("data-box")


def test_drag_moves_and_the_wheel_zooms(open_page):
    page = open_page(transformer(2))
    before = box(page, "h.0").bounding_box()
    page.mouse.move(100, 300)
    page.mouse.down()
    page.mouse.move(180, 340, steps=4)
    page.mouse.up()
    after = box(page, "h.0").bounding_box()
    assert after["x"] - before["x"] == pytest.approx(80, abs=2)
    assert after["y"] - before["y"] == pytest.approx(40, abs=2)
    page.mouse.wheel(0, 400)
    assert box(page, "h.0").bounding_box()["width"] < after["width"] * 0.8


def test_light_and_dark_follow_the_reader_and_the_button(open_page):
    page = open_page(residual(1), dark=True)
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) == "rgb(18, 23, 29)"
    page.click("#theme")
    assert page.evaluate(colour) == "rgb(255, 255, 255)"


def python_boxes(graph, depth):
    root = build_tree(graph)
    layout = Layout(graph, root, Cards(graph, choose_coloring(graph, "op"), verbose=False))
    numbers = {found.key: index for index, found in enumerate(root.walk())}
    places = {}

    def visit(group, x, y):
        for placed in group.boxes:
            left = placed.inside.axis if placed.inside else placed.card.extent.left
            places[numbers[placed.box.key]] = (x + placed.x - left, y + placed.y)
            if placed.inside:
                visit(placed.inside, x + placed.x - left, y + placed.y)

    top = layout.open(root, opened_keys(root, depth))
    visit(top, 0, 0)
    return places, (top.width, top.height)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "graph", [residual(2), transformer(2), nested(300)], ids=["residual", "transformer", "nested"]
)
def test_the_page_and_python_put_every_box_in_the_same_place(open_page, graph, depth):
    page = open_page(graph, depth=depth)
    drawn = page.evaluate("[...state.places].map(([index, place]) => [index, place.x, place.y])")
    size = page.evaluate("[state.size.width, state.size.height]")
    expected, expected_size = python_boxes(graph, depth)
    assert {index for index, _, _ in drawn} == set(expected)
    for index, x, y in drawn:
        assert (x, y) == pytest.approx(expected[index], abs=1e-6)
    assert size == pytest.approx(expected_size)


def test_a_large_graph_starts_closed_and_refuses_to_open_too_much(open_page):
    page = open_page(nested(6000))
    assert count(page) <= 45
    for _ in range(6):
        page.keyboard.press("e")
    assert count(page) <= 3000
    assert "would make the page slow" in page.locator("#details").inner_text()


def test_names_are_shown_as_text(open_page):
    from test_picture_formats import NASTY, nasty_graph

    page = open_page(nasty_graph())
    assert page.locator("h1").inner_text() == NASTY
    page.keyboard.press("/")
    page.keyboard.type("sin")
    page.keyboard.press("Enter")
    assert page.locator("#details b").count() == 0
