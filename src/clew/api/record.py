"""Recording: ``clew.watch`` inside one's own loop, and ``clew run`` around a whole script."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from clew import logs
from clew.api.recording import Recording
from clew.api.repeated import describe_program, meet
from clew.capture.frame_variables import variables_of
from clew.capture.settings import load_settings
from clew.errors import ClewError, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from clew.capture.settings import Settings
    from clew.replay.stops import Stops


class Watch:
    """A recording that goes on while its ``with`` block does. ``path`` is the run folder."""

    def __init__(self, recording: Recording, models: Any, optimizers: Any) -> None:
        self._recording = recording
        self._models = models
        self._optimizers = optimizers
        self._is_watching = True

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self._recording.folder

    @property
    def step(self) -> int:
        """The step that is going on, counted from 0."""
        return self._recording.session.step if self._is_watching else 0

    def __enter__(self) -> Watch:
        self._is_watching = _start_safely(
            self._recording, models=self._models, optimizers=self._optimizers, is_asked=True
        )
        # Somebody may enter by hand and never leave. The writer has its own, later, which knows of no unfinished step.
        atexit.register(self._recording.finish_at_exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        atexit.unregister(self._recording.finish_at_exit)
        self._recording.finish("complete" if error is None else "died", error=error)

    def log(self, **numbers: Any) -> None:
        """Record numbers of the current step, such as ``accuracy=0.9``: of Python or numpy, or tensors of one element.

        A name that clew uses itself gets ``log.`` before it: ``run.log(loss=…)`` is kept as ``log.loss``.
        """
        if self._is_watching:
            self._recording.session.log(**numbers)

    def pause(self) -> None:
        """Look away: training runs as if clew were not there until ``resume``."""
        if self._is_watching:
            self._recording.session.pause()

    def resume(self) -> None:
        """Look again after ``pause``."""
        if self._is_watching:
            self._recording.session.resume()


def watch(model: Any = None, optimizer: Any = None, **settings: Any) -> Watch:
    """Record the training inside a ``with`` block.

    ``model``: a module, a list or a dict of them, or None for every model that is called. ``optimizer``: one or
    several; optimizers made later or never named are found when they step. Settings are those of ``clew run``:
    ``every=10``, ``budget="3%"``, ``sites="layers.*"``, ``kinds="output,grad"``, ``out="runs"``, ``name="try"`` …
    ``on_hit`` may also be a function that is called with the finding when a watchpoint fires.
    """
    logs.configure()
    chosen = load_settings(settings, origin="clew.watch")
    on_hit = settings.get("on_hit")
    models = _name_models(model)
    optimizers = _as_list(optimizer)
    _check_types(models, optimizers)
    again = meet()
    if again is not None:
        return cast("Watch", again.watch(models, optimizers))  # it behaves as one
    program = describe_program()
    recording = Recording(
        chosen,
        command=program.command,
        is_module=program.is_module,
        watch=program.number,
        obstacle=program.obstacle,
        title=chosen.name or Path(sys.argv[0]).stem or "watch",
        on_hit=on_hit if callable(on_hit) else None,
    )
    return Watch(recording, models, optimizers)


def run_script(
    target: str, argv: list[str], *, module: bool, settings: Settings, stops: Stops | None = None
) -> int:
    """Run a script or module as Python would, recorded, and return its exit code."""
    from clew.api.import_hook import call_after_import
    from clew.api.script import execute, load_module, load_script

    program = load_module(target) if module else load_script(target)
    title = settings.name or (target.rpartition(".")[2] if module else Path(target).stem)
    recording = Recording(
        settings, command=[target, *argv], title=title, is_script=True, is_module=module, stops=stops
    )
    recording.seeds.start()
    call_off_numpy = call_after_import("numpy.random", recording.seeds.watch_numpy)
    call_off = call_after_import("torch", lambda: _start_safely(recording))
    try:
        outcome = execute(program, argv)
        _await_threads()
    finally:
        call_off()
        call_off_numpy()
    state = "died" if outcome.error is not None else "complete"
    recording.finish(state, exit_code=outcome.exit_code, error=outcome.error)
    if stops is not None and stops.post_mortem and outcome.error is not None:
        open_post_mortem(outcome.error, stops, recording)
    if outcome.was_interrupted:
        # Python ends itself by the signal, after its exit handlers; it has shown the traceback already.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    return outcome.exit_code


def open_post_mortem(error: BaseException, stops: Stops, recording: Recording) -> None:
    """Look at the frames of an exception that ended the script, at the prompt."""
    from clew.render.prompt import Front, Script, Terminal, converse, is_interactive
    from clew.replay.debugger import Debugger
    from clew.replay.postmortem import PostMortem

    if isinstance(error, KeyboardInterrupt):
        return
    card = recording.card or {}
    modules = tuple(module["site"] for module in card.get("modules", ()) if module["site"])
    world = PostMortem(error, step=recording.step, site=card.get("site", ""), modules=modules)
    debugger = Debugger(world)
    front: Front
    if stops.commands is not None:
        front = Script(stops.commands, sys.stdout)
    elif is_interactive():
        front = Terminal(debugger)
    else:
        print("clew: --pdb is off: there is no terminal", file=sys.stderr)
        return
    converse(debugger, front)


def _await_threads() -> None:
    """Wait for the script's own threads, as Python does before it ends: they may still be training.

    Threads of a pool wait for work for ever; Python first has the pools send theirs home.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for send_home in reversed(getattr(threading, "_threading_atexits", ())):
            with contextlib.suppress(Exception):  # it is called again when Python ends, and may fail then
                send_home()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


def _start_safely(
    recording: Recording, *, models: Any = (), optimizers: Any = (), is_asked: bool = False
) -> bool:
    """Begin to record and return whether that went well; the training goes on, whatever is wrong with us.

    ``is_asked``: the user's own line asked for the recording, and hears of what is wrong with it.
    """
    try:
        recording.start(models=models, optimizers=optimizers)
    except ClewError as error:
        if is_asked:
            raise
        print(f"clew: not recording: {error}", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - ours to answer for
        print(f"clew: not recording, fault inside clew: {error!r}", file=sys.stderr)
    else:
        return True
    return False


def _name_models(model: Any) -> list[tuple[str, Any]]:
    """Return models with names: the keys of a dict, or what the caller's variables are called."""
    if model is None:
        return []
    if isinstance(model, dict):
        return [(str(name), one) for name, one in model.items()]
    listed = list(model) if isinstance(model, (list, tuple)) else [model]
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    names = {id(value): name for name, value in (variables_of(caller).items() if caller is not None else ())}
    return [(names.get(id(one), f"model{index}"), one) for index, one in enumerate(listed)]


def _as_list(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _check_types(models: list[tuple[str, Any]], optimizers: list[Any]) -> None:
    import torch

    for name, model in models:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"'{name}' is a {type(model).__name__}, not a torch.nn.Module",
                where="clew.watch(model, …)",
                next_step="give the model itself, a list or dict of models, or nothing to watch every model",
            )
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer",
                where="clew.watch(model, optimizer)",
                next_step="leave it out: optimizers are found when they step",
            )
