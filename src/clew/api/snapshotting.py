"""Joins the snapshots of a recording with the run folder they are written to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.capture.torch.snapshot import SnapshotLens
from clew.store.snapshots import SnapshotFolder, SnapshotWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clew.capture.settings import Settings
    from clew.capture.torch.session import TorchSession


def keep_snapshots(
    session: TorchSession, rank_folder: Path, settings: Settings, *, tell: Callable[[str], None]
) -> SnapshotLens | None:
    """Have a session take snapshots as the settings say; None when they are off."""
    if settings.snapshots == "off":
        return None
    limit = settings.snapshot_bytes
    if settings.quota_bytes is not None:
        limit = min(limit, settings.quota_bytes // 4)  # what they hold must not push the record out
    folder = SnapshotFolder(rank_folder, limit_bytes=limit, keep_batches=settings.keep_batches)
    writer = SnapshotWriter(folder, tell=tell)
    lens = SnapshotLens(session.recorder, session.optimizers, writer, settings=settings, limit_bytes=limit)
    session.add_lens(lens)
    return lens
