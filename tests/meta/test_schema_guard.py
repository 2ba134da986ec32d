"""The format of a run may change only together with its version."""

import hashlib

from clew.model import schema
from clew.store.tables import TABLES

KNOWN = {1: "bd5809dc4c976bdf"}
"""Version of the format, and the fingerprint of what a reader depends on. Add a line, never change one."""


def fingerprint() -> str:
    words = [
        schema.STAT_NAMES,
        schema.DERIVED_STATS,
        schema.KINDS,
        schema.MODES,
        (schema.HIST_MAGNITUDES, schema.HIST_BINS, schema.HIST_LOW_EXPONENT),
        *((table.name, *(f"{field.name}:{field.type}" for field in table.schema)) for table in TABLES),
    ]
    return hashlib.sha256(repr(words).encode()).hexdigest()[:16]


def test_columns_and_version_change_together():
    assert fingerprint() == KNOWN.get(schema.FORMAT_VERSION), (
        "what is on disk has changed: raise FORMAT_VERSION, keep the old version readable, and note the new "
        f"fingerprint {fingerprint()} here"
    )


def test_a_changed_column_would_be_seen(monkeypatch):
    before = fingerprint()
    monkeypatch.setattr(schema, "KINDS", (*schema.KINDS, "another"))
    assert fingerprint() != before
