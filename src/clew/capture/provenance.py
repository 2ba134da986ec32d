"""What ran, from what code, on what machine: collected once at the start, secrets left out."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from clew.model.record import RunInfo

ENVIRONMENT_PREFIXES: Final = (
    "ACCELERATE_",
    "CLEW_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "GLOO_",
    "HF_",
    "KMP_",
    "LOCAL_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PL_",
    "PYTHON",
    "RANK",
    "SLURM_",
    "TOKENIZERS_",
    "TORCH",
    "WORLD_SIZE",
)
_SECRET: Final = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SECRET_ARGUMENT: Final = re.compile(
    r"^(--?[\w-]*(?:token|secret|password|passwd|api[-_]?key|credential|auth)[\w-]*)(=.*)?$", re.IGNORECASE
)
_SECRET_USER: Final = re.compile(r"(\w[\w+.-]*://[^/\s:@]*:)[^/\s]*(?=@)")
_SECRET_TOKEN: Final = re.compile(r"(https?://)[^/\s:@]+(?=@)", re.IGNORECASE)
_SECRET_QUERY: Final = re.compile(
    r"([?&][\w.-]*(?:token|secret|password|passwd|api[-_]?key|credential|auth|signature)[\w.-]*=)[^&\s#]+",
    re.IGNORECASE,
)
"""In an address: a password after the user, a token in the user's place, and one among the parameters."""
_GIT_SECONDS: Final = 5
_HIDDEN: Final = "(hidden)"


def collect(name: str, command: list[str], settings: dict[str, Any]) -> RunInfo:
    """Return the provenance of a run that starts now."""
    return RunInfo(
        name=name,
        command=hide_secrets(command),
        started=now(),
        rank=read_rank(),
        world_size=_read_number("WORLD_SIZE", 1),
        python=platform.python_version(),
        settings=settings,
        git=read_git(Path.cwd()),
        packages=read_packages(),
        hardware=read_hardware(),
        environment=read_environment(),
    )


def now() -> str:
    """Return the present time with its zone, to the millisecond."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def read_rank() -> int:
    """Return the rank of this process among those that train together, as launchers announce it."""
    return _read_number("RANK", 0)


def hide_secrets(command: list[str]) -> list[str]:
    """Return the command with the values of arguments that look like secrets hidden."""
    hidden: list[str] = []
    hide_next = False
    for word in command:
        found = _SECRET_ARGUMENT.match(word)
        if hide_next and not word.startswith("-"):
            hidden.append(_HIDDEN)
        elif found and found.group(2):
            hidden.append(f"{found.group(1)}={_HIDDEN}")
        else:
            hidden.append(hide_in_address(word))
        hide_next = bool(found and not found.group(2))
    return hidden


def hide_in_address(text: str) -> str:
    """Return a text with the secrets in addresses hidden: ``https://user:(hidden)@host/x``."""
    for pattern in (_SECRET_USER, _SECRET_TOKEN, _SECRET_QUERY):
        text = pattern.sub(rf"\g<1>{_HIDDEN}", text)
    return text


def read_environment() -> dict[str, str]:
    """Return the environment variables that change training, never those that look like secrets."""
    return {
        key: hide_in_address(value)
        for key, value in sorted(os.environ.items())
        if key.startswith(ENVIRONMENT_PREFIXES) and not _SECRET.search(key)
    }


def read_git(folder: Path) -> dict[str, Any]:
    """Return commit, branch and whether files differ from it; empty outside a repository."""
    commit = _ask_git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _ask_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": _ask_git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(changed),
        "changed": [line[3:] for line in changed.splitlines()[:50]],
    }


def _ask_git(folder: Path, *words: str) -> str:
    try:
        # Optional locks off: a look at the state must not touch the user's index.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""


def read_packages() -> dict[str, str]:
    """Return the version of every installed distribution."""
    return dict(_read_packages(tuple(sys.path)))


@functools.cache
def _read_packages(_path: tuple[str, ...]) -> dict[str, str]:
    # Hundreds of files are read for it: once is enough for all runs that a process records.
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        if name := metadata["Name"]:
            versions[str(name)] = str(metadata["Version"])
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def read_hardware() -> dict[str, Any]:
    """Return host, system, processor, cores and memory, as far as they can be read without a framework."""
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "processor": _read_processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": _read_memory_bytes(),
        "executable": sys.executable,
    }


def _read_processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1).strip() if found else platform.processor()


def _read_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def _read_number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else otherwise
