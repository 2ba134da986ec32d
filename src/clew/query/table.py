"""What a query returns: a series of numbers over steps, or a small table of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

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
    """Rows as columns. ``table["site"]`` is a numpy array; iteration and ``table[0]`` give a row as a dict.

    ``table[2:5]`` is the table of these rows.

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

    @overload
    def __getitem__(self, key: str) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...

    def __getitem__(self, key: str | int | slice) -> NDArray[Any] | dict[str, Any] | Table:
        if isinstance(key, slice):
            return self.take(np.arange(len(self))[key])
        if isinstance(key, (int, np.integer)):
            return self.row(int(key))
        return self._column(key)

    def _column(self, column: str) -> NDArray[Any]:
        codes = self.codes(column)
        names = self._names.get(column)
        return codes if names is None else np.array([*names, None], object)[:-1][codes]

    def codes(self, column: str) -> NDArray[Any]:
        """Return a column as stored: numbers also where ``table[column]`` gives names."""
        if not isinstance(column, str) or column not in self._columns:
            column = str(column)
            raise UsageError(
                f"the table has no column '{column}'", next_step=suggest(column, self._columns) or str(self)
            )
        return self._columns[column]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lists = [self._column(column).tolist() for column in self._columns]
        for values in zip(*lists, strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def row(self, index: int) -> dict[str, Any]:
        """Return one row; a negative number counts from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"the table has {len(self)} rows, and no row {index}")
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
