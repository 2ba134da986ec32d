"""Pictures of a graph: into a file, a notebook or a browser."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from clew.model.graph import Graph

FORMATS: Final = ("svg", "png", "html", "dot", "mermaid", "json", "tensorboard")
_ENDINGS: Final = {"mmd": "mermaid", "gv": "dot", "htm": "html"}
_NOTEBOOK_HEIGHT: Final = 640


def save(
    graph: Graph,
    path: str | Path,
    *,
    format: str | None = None,
    color: str = "op",
    verbose: bool = False,
    depth: int | None = None,
) -> Path:
    """Draw a graph into a file and return its path; the ending decides how: svg png html dot mermaid json.

    ``color`` is ``op``, ``health`` or the name of a statistic that the graph was traced with. ``verbose`` adds
    arguments and outlines what needs a gradient. ``depth`` is the number of levels that are open.
    ``format="tensorboard"`` takes the path of a folder and writes an event file into it.
    """
    target = Path(path)
    form = choose_format(target, format)
    if form == "tensorboard":
        return _save_events(graph, target)
    data = render(graph, form, color=color, verbose=verbose, depth=depth)
    try:
        target.write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"cannot write the picture: {error.strerror}", where=str(target), next_step="choose another path"
        ) from error
    return target


def _save_events(graph: Graph, folder: Path) -> Path:
    from clew.render.tensorboard import EventFile

    with EventFile(folder) as file:
        file.add_graph(graph, time=time.time())
    return folder


def render(
    graph: Graph,
    format: str,
    *,
    color: str = "op",
    verbose: bool = False,
    depth: int | None = None,
) -> bytes:
    """Return a graph as the bytes of a file of one of ``FORMATS``."""
    if format == "json":
        return graph.to_json(indent=1).encode()
    if format == "html":
        from clew.render.graph_html import render_html

        return render_html(graph, color=color, verbose=verbose, depth=depth).encode()
    if format in ("dot", "mermaid"):
        return _render_text(graph, format, color=color, verbose=verbose, depth=depth).encode()
    from clew.render.png import render_png
    from clew.render.svg import render_svg
    from clew.views.graph_scene import draw_graph

    scene = draw_graph(graph, color=color, verbose=verbose, depth=depth)
    return render_png(scene) if format == "png" else render_svg(scene).encode()


def _render_text(graph: Graph, format: str, **options: Any) -> str:
    from clew.render.graph_dot import render_dot
    from clew.render.graph_mermaid import render_mermaid
    from clew.views.graph_outline import outline_graph

    outline = outline_graph(graph, **options)
    return render_dot(outline) if format == "dot" else render_mermaid(outline)


def choose_format(path: Path, asked: str | None = None) -> str:
    """Return the format of a picture by what was asked for, or by the ending of its name."""
    ending = (asked or path.suffix.removeprefix(".")).lower()
    name = _ENDINGS.get(ending, ending)
    if name in FORMATS:
        return name
    what = f"no format '{ending}' for a picture" if ending else "a picture needs a format"
    hint = suggest(ending, FORMATS) or f"end the name with one of: {', '.join(FORMATS[:-1])}"
    raise UsageError(what, where=str(path), next_step=hint)


class GraphPicture:
    """The picture of a graph as a notebook shows it; elsewhere it says where its page is."""

    def __init__(self, graph: Graph, options: dict[str, Any], path: Path | None = None) -> None:
        self.graph = graph
        self.path = path
        self._options = options

    def _repr_html_(self) -> str:
        # A frame of its own keeps the page's script and style apart from the notebook's.
        page = escape(render(self.graph, "html", **self._options).decode())
        style = f"width:100%;height:{_NOTEBOOK_HEIGHT}px;border:1px solid #b9c2cc;border-radius:8px"
        return f'<iframe srcdoc="{page}" style="{style}" title="Graph of {escape(self.graph.name)}"></iframe>'

    def _repr_svg_(self) -> str:
        return render(self.graph, "svg", **self._options).decode()

    def __repr__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"<GraphPicture of {self.graph.name}: {len(self.graph.operations)} operations{where}>"


def view(graph: Graph, **options: Any) -> GraphPicture:
    """Show a graph: in place in a notebook, in the browser where there is a screen, else say where the page is.

    Takes ``color``, ``verbose`` and ``depth`` as ``save`` does.
    """
    if _is_notebook():
        return GraphPicture(graph, options)
    path = Path(tempfile.mkdtemp(prefix="clew-graph-")) / "graph.html"
    save(graph, path, **options)
    if not (_has_screen() and _open_browser(path)):
        sys.stderr.write(f"clew: the picture is in {path}\n")
    return GraphPicture(graph, options, path)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _has_screen() -> bool:
    if sys.platform.startswith(("darwin", "win")):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open_browser(path: Path) -> bool:
    import webbrowser

    try:
        return webbrowser.open(path.as_uri())
    except webbrowser.Error:
        return False
