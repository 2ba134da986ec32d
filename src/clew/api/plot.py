"""Numbers of one or several runs as lines over steps or time: for a file, a notebook or the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from clew.errors import UsageError, suggest
from clew.model.glob import compile_globs
from clew.query import Run
from clew.query.times import STEP_TIME, passed_at, step_times
from clew.views.line_chart import MOST_LINES, Axes, Drawn, draw_lines, mean_over

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from clew.query import Series
    from clew.views.block import Page

FORMS: Final = ("svg", "png")
_X: Final = {"step": ("step", 1.0), "s": ("seconds", 1.0), "min": ("minutes", 60.0), "h": ("hours", 3600.0)}


class Wish(NamedTuple):
    """What to draw: scalars by name, or a statistic of a kind at sites; and over which axis."""

    scalars: tuple[str, ...] = ()
    site: str | None = None
    kind: str = "output"
    stat: str = "l2"
    mean: int = 1
    x: str = "step"
    rank: int = 0


@final
class Chart:
    """Lines over one pair of axes: save them, look at them in a notebook or on the terminal, take the numbers."""

    def __init__(self, lines: list[Drawn], axes: Axes) -> None:
        self.lines = lines
        self.axes = axes

    def save(self, path: str | Path) -> Path:
        """Write the picture; the ending decides: .svg or .png."""
        target = Path(path)
        form = target.suffix.lstrip(".").lower()
        if form not in FORMS:
            raise UsageError(
                f"'{target.name}' has no ending that can be drawn",
                next_step=suggest(form, FORMS) or "save it as .svg or .png",
            )
        target.write_bytes(self._render(form))
        return target

    def show(self) -> None:
        """Draw each line on the terminal, with its first, last, lowest and highest value."""
        from clew.render.terminal import show

        show(self.page())

    def page(self) -> Page:
        """Return what the terminal shows, as blocks."""
        from clew.views.line_page import make_page

        return make_page(self.lines, self.axes)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, for programs: ``{"x": label, "lines": [{"name", "x", "y"}]}``."""
        lines = [{"name": line.name, "x": line.x.tolist(), "y": line.y.tolist()} for line in self.lines]
        return {"x": self.axes.x_label, "y": self.axes.y_label, "lines": lines}

    def _render(self, form: str) -> bytes:
        from clew.render.png import render_png
        from clew.render.svg import render_svg

        scene = draw_lines(self.lines, self.axes)
        return render_svg(scene).encode() if form == "svg" else render_png(scene)

    def _repr_svg_(self) -> str:
        return self._render("svg").decode()

    def __repr__(self) -> str:
        return f"<Chart of {', '.join(line.name for line in self.lines)}>"


def plot(
    *runs: str | Path | Run,
    scalar: str | Sequence[str] = (),
    site: str | None = None,
    kind: str = "output",
    stat: str = "l2",
    mean: int = 1,
    x: str = "step",
    log: bool | None = None,
    title: str = "",
    x_range: tuple[float | None, float | None] = (None, None),
    y_range: tuple[float | None, float | None] = (None, None),
    rank: int = 0,
    root: str | Path = "runs",
) -> Chart:
    """Draw numbers of one or several runs over their steps, all in one picture.

    ``scalar`` names recorded scalars (patterns have ``*``; ``loss`` unless said; ``time`` is the seconds of each
    step); ``site`` draws a statistic of a kind at each site that fits instead. ``mean`` takes the mean of so many
    values after each other, ``x`` is ``step``, ``s``, ``min`` or ``h`` of training.
    """
    if mean < 1 or x not in _X:
        raise UsageError(
            f"mean={mean} is no number of values" if mean < 1 else f"x='{x}' is no axis",
            next_step="give 1 or more" if mean < 1 else suggest(x, _X) or f"one of {', '.join(_X)}",
        )
    if scalar and site is not None:
        raise UsageError("a scalar has no site", next_step="give scalar or site, not both")
    names = (scalar,) if isinstance(scalar, str) else tuple(scalar)
    wish = Wish(names or ("loss",), site, kind, stat, mean, x, rank)
    lines = [line for run in runs or ("latest",) for line in _lines_of(_open(run, root), wish, len(runs) > 1)]
    if len(lines) > MOST_LINES:
        raise UsageError(
            f"{len(lines)} lines cannot be told apart",
            next_step=f"choose at most {MOST_LINES}: a narrower pattern, fewer runs",
        )
    y_label = f"{kind} {stat}" if site is not None else ", ".join(wish.scalars)
    return Chart(lines, Axes(title, _X[x][0], y_label, log, x_range, y_range))


def _open(run: str | Path | Run, root: str | Path) -> Run:
    if isinstance(run, Run):
        return run
    from clew.api.read import open_run

    return open_run(run, root=root)


def _lines_of(run: Run, wish: Wish, is_one_of_many: bool) -> Iterator[Drawn]:
    found = list(_series_of(run, wish))
    for series in found:
        places = _places(run, series, wish)
        x, y = mean_over(places, series.values, wish.mean)
        label = series.name if wish.site is None else series.name.removesuffix(f" {wish.kind} {wish.stat}")
        is_plain = is_one_of_many and len(found) == 1 and wish.site is None
        name = run.name if is_plain else f"{run.name} {label}" if is_one_of_many else label
        yield Drawn(name, x, y)


def _series_of(run: Run, wish: Wish) -> Iterator[Series]:
    if wish.site is not None:
        sites = run.find(wish.site, kind=wish.kind)
        if not sites:
            raise UsageError(
                f"no site '{wish.site}' has a recorded '{wish.kind}'", where=run.name,
                next_step=f"'clew show {run.name}' lists the sites",
            )  # fmt: skip
        yield from (run.series(site, wish.kind, wish.stat, rank=wish.rank) for site in sites)
        return
    known = run.scalars(rank=wish.rank)
    apart = run.losses(rank=wish.rank)
    for name in wish.scalars:
        fits = compile_globs((name,))
        chosen = [known[each] for each in known if fits(each)] if "*" in name or "?" in name else []
        if name == STEP_TIME and STEP_TIME not in known:
            chosen = [step_times(run, rank=wish.rank)]
        elif not chosen:  # where optimizers take turns: loss of d, loss of g
            chosen = [apart[each] for each in apart if each == name or each.startswith(f"{name} of ")]
        yield from chosen or [run.scalar(name, rank=wish.rank)]


def _places(run: Run, series: Series, wish: Wish) -> NDArray[np.float64]:
    """Return where the values lie on the axis: their steps, or the time of training that had passed."""
    if wish.x == "step":
        return series.steps.astype(np.float64)
    passed = passed_at(run, series.steps, rank=wish.rank)
    if len(passed) < len(series):
        raise UsageError("no times were recorded", where=run.name, next_step="draw over steps: leave x out")
    return passed.values / _X[wish.x][1]
