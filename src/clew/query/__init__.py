"""Runs as one asks about them: series, first occurrences, tables; no framework needed."""

from clew.query.run import Run as Run
from clew.query.table import Series as Series
from clew.query.table import Table as Table

__all__ = ["Run", "Series", "Table"]
