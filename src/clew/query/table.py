"""What a query returns: a series of numbers over steps, or a small table of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clew.errors import MissingExtra, UsageError, suggest
from clew.store import tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Numbers over steps, in order of steps; both arrays have the same length."""

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.steps.tolist(), self.values.tolist(), strict=True))

    @property
    def last(self) -> float:
        """The newest value, NaN when there is none."""
        return float(self.values[-1]) if len(self.values) else float("nan")


class Table:
    """Rows as columns. ``table["site"]`` is a numpy array; iteration gives each row as a dict.

    Columns of names (site, kind, mode) are kept as numbers; ``codes`` gives these.
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], names: Mapping[str, list[str]] | None = None
    ) -> None:
        self._columns = dict(columns)
        self._names = dict(names or {})

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self._columns)})"

    def __contains__(self, column: object) -> bool:
        return column in self._columns

    def __getitem__(self, column: str) -> NDArray[Any]:
        codes = self.codes(column)
        names = self._names.get(column)
        return codes if names is None else np.array([*names, None], object)[:-1][codes]

    def codes(self, column: str) -> NDArray[Any]:
        """Return a column as stored: numbers also where ``table[column]`` gives names."""
        if column not in self._columns:
            raise UsageError(
                f"the table has no column '{column}'", next_step=suggest(column, self._columns) or str(self)
            )
        return self._columns[column]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lists = [self[column].tolist() for column in self._columns]
        for values in zip(*lists, strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def row(self, index: int) -> dict[str, Any]:
        """Return one row."""
        return next(iter(self.take(np.array([index]))))

    def take(self, rows: NDArray[Any]) -> Table:
        """Return the rows of a mask or of row numbers, in that order."""
        return Table({name: column[rows] for name, column in self._columns.items()}, self._names)

    def to_arrow(self) -> Any:
        """Return a ``pyarrow.Table``."""
        columns = {
            name: (column, self._names[name]) if name in self._names else column
            for name, column in self._columns.items()
        }
        return tables.arrow_table(columns)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; needs pandas."""
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
        except ImportError as error:
            raise MissingExtra("to_pandas needs pandas", next_step="pip install pandas") from error
        return self.to_arrow().to_pandas()
