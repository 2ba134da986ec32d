"""What to record and at what cost: defaults, then a settings file, then ``CLEW_*``, then the command line."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from clew.errors import UsageError, suggest
from clew.model.glob import split_patterns, translate
from clew.model.schema import KINDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_KINDS: Final = ("batch", "output", "grad_output", "param", "grad", "update", "buffer", "loss")
ENVIRONMENT_PREFIX: Final = "CLEW_"
_NOT_SETTINGS: Final = ("CLEW_CHECKS", "CLEW_KERNEL", "CLEW_LOG", "CLEW_LOG_FILE")
"""Variables of clew that are no settings of a run: taps in the user's code off, the way statistics are computed."""

HIT_ACTIONS: Final = ("log", "snapshot", "pause", "stop")
"""What a watchpoint that fires may do; a function of one's own can be given in Python only."""

_OFF: Final = ("off", "none", "no", "unlimited")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is recorded.

    ``every``: record every Nth step; None leaves it to the budget. ``budget``: the share of the run's time
    that clew may take, or None for every step. ``sites``: patterns, ``!pattern`` excludes.
    ``warmup_steps``: steps at the start that are all recorded, whatever ``every`` or ``budget`` say, since probes look
    at recorded steps only. ``quota_bytes``: how large the run may grow, or None. ``doctor``: whether the rules
    look while the run goes on. ``watch``: watchpoints, and ``on_hit`` what one that fires does. ``on_nonfinite``: what
    to do when a loss or gradient is NaN or infinite.
    ``hang_seconds``: after how long without the end of a step all stacks are written, or None. ``snapshots``: ``auto``,
    ``off`` or ``every:N``; ``snapshot_bytes`` bounds them, ``keep_batches`` is of how many steps the batches stay, and
    ``data`` whether any of the user's data may be kept at all. ``explain``: who executes a bad step again, a fork of
    the training or a process afterwards.
    """

    every: int | None = None
    budget: float | None = 0.03
    sites: tuple[str, ...] = ("*",)
    kinds: tuple[str, ...] = DEFAULT_KINDS
    histograms: bool = True
    hashes: bool = True
    out: str = "runs"
    name: str | None = None
    quota_bytes: int | None = 4_000_000_000
    status: bool = True
    warmup_steps: int = 20
    doctor: bool = True
    watch: tuple[str, ...] = ()
    on_hit: str = "log"
    on_nonfinite: str = "explain"
    hang_seconds: float | None = None
    snapshots: str = "auto"
    snapshot_bytes: int = 1_000_000_000
    keep_batches: int = 512
    data: bool = True
    explain: str = "fork"


def load_settings(
    overrides: Mapping[str, object] | None = None,
    *,
    start: Path | None = None,
    environment: Mapping[str, str] | None = None,
    origin: str = "command line",
) -> Settings:
    """Return the settings for a run started in ``start`` (the working directory unless given).

    ``overrides`` uses the keys of the settings file; values may be text (``"3%"``) or plain (``0.03``), and
    None means not given. ``origin`` names them in errors.
    """
    settings = Settings()
    found = find_settings_file(start or Path.cwd())
    if found is not None:
        path, table = found
        settings = apply(settings, table, origin=str(path))
    variables = os.environ if environment is None else environment
    settings = apply(settings, _read_environment(variables), origin="environment")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    return apply(settings, given, origin=origin)


def apply(settings: Settings, table: Mapping[str, object], *, origin: str) -> Settings:
    """Return the settings changed by a table of keys and values; ``origin`` says where they were written."""
    for key, value in table.items():
        if key not in _KEYS:
            raise UsageError(
                f"unknown setting '{key}'",
                where=origin,
                next_step=suggest(key, _KEYS) or f"known settings: {', '.join(sorted(_KEYS))}",
            )
        field, parse = _KEYS[key]
        try:
            parsed: Any = parse(value)
        except UsageError as error:
            raise UsageError(
                f"setting '{key}': {error.what}", where=origin, next_step=error.next_step
            ) from None
        settings = replace(settings, **{field: parsed})
    return settings


def find_settings_file(start: Path) -> tuple[Path, dict[str, object]] | None:
    """Return the nearest ``clew.toml`` or ``pyproject.toml`` with a ``[tool.clew]`` table, and its keys."""
    for folder in (start, *start.parents):
        own = folder / "clew.toml"
        if own.is_file():
            return own, _read_toml(own)
        shared = folder / "pyproject.toml"
        if shared.is_file() and (table := _read_pyproject(shared)) is not None:
            return shared, table
    return None


def _read_pyproject(path: Path) -> dict[str, object] | None:
    # A broken pyproject that says nothing about clew is somebody else's to complain about.
    try:
        if "clew" not in path.read_text(encoding="utf-8", errors="replace"):
            return None
    except OSError:
        return None
    tools = _read_toml(path).get("tool", {})
    table = tools.get("clew") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(
            "[tool.clew] must be a table",
            where=str(path),
            next_step="write [tool.clew] on a line of its own, and settings such as every = 10 below it",
        )
    return table


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the settings file is not valid TOML: {error}",
            where=str(path),
            next_step="write lines such as every = 10",
        ) from None
    except OSError as error:
        raise UsageError(
            f"the settings file cannot be read: {error.strerror}",
            where=str(path),
            next_step="make it readable, or take it away",
        ) from None
    return table


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    table: dict[str, object] = {}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _NOT_SETTINGS:
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in _KEYS:
            names = [ENVIRONMENT_PREFIX + known.upper() for known in _KEYS]
            raise UsageError(
                f"unknown setting '{variable}'",
                where="environment",
                next_step=suggest(variable, names) or f"known settings: {', '.join(sorted(names))}",
            )
        table[key] = environment[variable]
    return table


def parse_every(value: object) -> int | None:
    """Return a period from ``10`` or ``every 10``; ``off`` leaves it to the budget."""
    if isinstance(value, str) and value.strip().lower() in _OFF:
        return None
    text = value.strip().lower().removeprefix("every").strip() if isinstance(value, str) else value
    number = _whole_number(text)
    if number is None or number < 1:
        raise UsageError(f"{value!r} is not a number of steps", next_step="write a whole number, such as 10")
    return number


def parse_budget(value: object) -> float | None:
    """Return a share of time from ``3%`` or ``0.03``; ``off``, ``none`` and 0 mean every step."""
    if isinstance(value, str) and value.strip().lower() in _OFF:
        return None
    share = _share(value)
    if share is None or not 0 <= share <= 1:
        raise UsageError(
            f"{value!r} is not a share of time",
            next_step="write a share such as 3% or 0.03, or off",
        )
    return share or None


def parse_sites(value: object) -> tuple[str, ...]:
    """Return patterns from ``layers.*,!*.norm`` or a list of them."""
    patterns = _texts(value, split_patterns)
    for pattern in patterns:
        translate(pattern.removeprefix("!"))
    return patterns


def parse_kinds(value: object) -> tuple[str, ...]:
    """Return kinds from ``output,grad`` or a list of them; ``all`` is every kind."""
    kinds = _texts(value, split_patterns)
    if kinds == ("all",):
        return KINDS
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(
                f"unknown kind '{kind}'", next_step=suggest(kind, KINDS) or f"known kinds: {', '.join(KINDS)}"
            )
    return tuple(dict.fromkeys(kinds))


def parse_switch(value: object) -> bool:
    """Return a yes or no from a TOML boolean or the usual words."""
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{value!r} is neither yes nor no", next_step="write true or false")


_UNITS: Final = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(value: object) -> int | None:
    """Return a size from ``2GB``, ``500 MB``, ``1.5GiB`` or a plain number; ``off`` means no limit."""
    text = str(value).strip().lower()
    if text in _OFF:
        return None
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([a-z]*)", text)
    if isinstance(value, bool) or found is None or found[2] not in _UNITS:
        raise UsageError(f"{value!r} is not a size", next_step="write a size such as 500MB or 2GB, or off")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size == 0:
        raise UsageError("a quota of 0 leaves no room for a record", next_step="write off for no limit")
    return size


def parse_out(value: object) -> str:
    """Return the folder that holds the runs."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise UsageError(f"{value!r} is not a folder", next_step="write a path such as runs")
    return str(Path(value).expanduser())


def parse_name(value: object) -> str:
    """Return the name of the run: one part of a path, not hidden and not ``latest``."""
    name = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(r"[^\W_][\w.+=@-]*", name) or name == "latest":
        raise UsageError(
            f"{value!r} cannot name a run",
            next_step="use letters, digits and . _ - + = @",
        )
    return name


def parse_warmup(value: object) -> int:
    """Return a number of steps, zero included."""
    number = _whole_number(value.strip() if isinstance(value, str) else value)
    if number is None or number < 0:
        raise UsageError(f"{value!r} is not a number of steps", next_step="write a whole number, such as 20")
    return number


def parse_watch(value: object) -> tuple[str, ...]:
    """Return watchpoints from one text (``;`` stands between several) or a list of them."""
    texts = _texts(value, lambda text: tuple(part.strip() for part in text.split(";") if part.strip()))
    return tuple(part for text in texts for part in (each.strip() for each in text.split(";")) if part)


def parse_on_hit(value: object) -> str:
    """Return what a watchpoint that fires does."""
    word = str(value).strip().lower()
    if callable(value) or word == "call":
        return "call"
    if word in HIT_ACTIONS:
        return word
    listed = ", ".join(HIT_ACTIONS)
    raise UsageError(
        f"{value!r} is no action", next_step=suggest(word, HIT_ACTIONS) or f"write one of {listed}"
    )


def parse_on_nonfinite(value: object) -> str:
    """Return what to do about a NaN or infinite loss or gradient: explain it, stop, or skip up to N steps."""
    word = str(value).strip().lower().replace(" ", "")
    if word in ("explain", "stop") or re.fullmatch(r"skip:[1-9]\d{0,8}", word):
        return word
    raise UsageError(
        f"{value!r} is no policy",
        next_step="write explain, stop, or skip:3 to leave out up to 3 bad steps in a row",
    )


def parse_seconds(value: object) -> float | None:
    """Return a time from ``60`` or ``2.5``; ``off`` means none."""
    text = str(value).strip().lower().removesuffix("s").strip()
    if text in _OFF:
        return None
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}(?:\.\d+)?", text) or not float(text):
        raise UsageError(
            f"{value!r} is not a number of seconds", next_step="write a number such as 60, or off"
        )
    return float(text)


def parse_snapshots(value: object) -> str:
    """Return when snapshots are taken: ``auto`` (as often as they are cheap), ``off``, or ``every:N``."""
    word = (
        "off" if value is False else str(value).strip().lower().replace(" ", "").replace("every=", "every:")
    )
    if word == "auto" or re.fullmatch(r"every:[1-9]\d{0,8}", word):
        return word
    if word in _OFF:
        return "off"
    raise UsageError(f"{value!r} does not say when", next_step="write auto, off, or every:100")


def parse_snapshot_limit(value: object) -> int:
    """Return how many bytes snapshots may take; there is no way to leave them unbounded."""
    size = parse_bytes(value)
    if size is None:
        raise UsageError("snapshots need a limit", next_step="write a size such as 2GB")
    return size


def parse_explain(value: object) -> str:
    """Return how a bad step is executed again: in a fork at once, in a process of its own afterwards, or not."""
    word = "off" if value is False else str(value).strip().lower()
    if word in ("fork", "process", "off"):
        return word
    raise UsageError(
        f"{value!r} is no way to explain",
        next_step=suggest(word, ("fork", "process", "off")) or "write fork, process or off",
    )


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value) else None


def _share(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    found = re.fullmatch(r"(\d*\.?\d+)\s*(%?)", value.strip()) if isinstance(value, str) else None
    return float(found[1]) / (100 if found[2] else 1) if found else None


def _texts(value: object, split: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    if isinstance(value, str):
        texts = split(value)
    elif isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        texts = tuple(value)
    else:
        raise UsageError(f"{value!r} is not a list of names", next_step="write names between commas")
    if not texts:
        raise UsageError("the list is empty", next_step="name at least one, or leave the setting out")
    return texts


_KEYS: Final[dict[str, tuple[str, Callable[[object], object]]]] = {
    "every": ("every", parse_every),
    "budget": ("budget", parse_budget),
    "sites": ("sites", parse_sites),
    "kinds": ("kinds", parse_kinds),
    "histograms": ("histograms", parse_switch),
    "hashes": ("hashes", parse_switch),
    "out": ("out", parse_out),
    "name": ("name", parse_name),
    "quota": ("quota_bytes", parse_bytes),
    "status": ("status", parse_switch),
    "warmup": ("warmup_steps", parse_warmup),
    "doctor": ("doctor", parse_switch),
    "watch": ("watch", parse_watch),
    "on_hit": ("on_hit", parse_on_hit),
    "on_nonfinite": ("on_nonfinite", parse_on_nonfinite),
    "hang_timeout": ("hang_seconds", parse_seconds),
    "snapshots": ("snapshots", parse_snapshots),
    "snapshot_limit": ("snapshot_bytes", parse_snapshot_limit),
    "keep_batches": ("keep_batches", parse_warmup),
    "data": ("data", parse_switch),
    "explain": ("explain", parse_explain),
}
"""Key of the settings file, the field it sets, and how its value is read."""

SETTING_KEYS: Final = tuple(_KEYS)
"""The keys a settings file, ``CLEW_*`` and ``clew.watch`` accept."""
