"""Ranks share a terminal: only the first of them shows the status line."""

import os
import pty
import sys

import pytest

from clew.api.recording import Recording
from clew.capture.settings import load_settings


@pytest.mark.parametrize(("rank", "is_shown"), [(None, True), ("0", True), ("1", False), ("3", False)])
def test_only_the_first_rank_shows_the_status_line(tmp_path, monkeypatch, rank, is_shown):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    near, far = pty.openpty()
    with open(far, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        settings = load_settings({"out": str(tmp_path)}, origin="clew run")
        recording = Recording(settings, command=["train.py"], title="train", is_script=True)
        status = recording._make_status()
        assert status.enabled is is_shown
        status.close()
    os.close(near)
