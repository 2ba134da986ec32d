"""How much two sites look like one place: by name, kind, shape, position and what they held at the start."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np

from clew.compare.name import is_turned_by_name, own_name, short_type, unwrap, words_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from clew.model.record import Site

EQUAL_NAME: Final = 6.0
EQUAL_OWN_NAME: Final = 1.5
EQUAL_WORDS: Final = 2.0
EQUAL_KIND: Final = 3.0
OTHER_KIND: Final = -4.0
EQUAL_SHAPE: Final = 3.0
TURNED_SHAPE: Final = 1.0
OTHER_SHAPE: Final = -6.0
EQUAL_FINGERPRINT: Final = 8.0
OTHER_FINGERPRINT: Final = -2.0
OTHER_AT_NUMBER: Final = -2.5
DISTANCE: Final = -1.0
NEEDED: Final = -2.0
"""Points of a pair of sites; the sum must be above zero. ``NEEDED`` is where each starts, so that position alone
or one weak hint pairs nothing. ``OTHER_AT_NUMBER``: in a sequence a module that is inserted takes the number of the one
it moves on, so a number is little of a name where another kind stands."""


_ORPHAN: Final = re.compile(r"optimizer\d*\.\d+$")
"""A parameter that an optimizer has and no module: it stands for none that a module has."""


def is_transposed(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two matrices have each other's shape turned round; a square one is taken as it is."""
    return len(a) == len(b) == 2 and a != b and a == b[::-1]


def is_laid_out_otherwise(a: Site, b: Site) -> bool:
    """Whether two parameters hold the same numbers in another order of axes: turned, or a kernel beside a weight."""
    if is_transposed(a.shape, b.shape):
        return True
    is_named = is_turned_by_name(a.name, b.name) or is_turned_by_name(b.name, a.name)
    return is_named and len(a.shape) >= 2 and sorted(a.shape) == sorted(b.shape)


class Likeness:
    """The points of any pair of sites of two sides, from columns of numbers made once."""

    def __init__(
        self,
        a: Sequence[Site],
        b: Sequence[Site],
        fingerprints: tuple[Mapping[str, int], Mapping[str, int]],
    ) -> None:
        self._codes: dict[object, int] = {}
        self._left = self._columns(a, fingerprints[0])
        self._right = self._columns(b, fingerprints[1])
        vocabulary = {word: index for index, word in enumerate(_all_words(a) | _all_words(b))}
        self._left_words = _word_table(a, vocabulary)
        self._right_words = _word_table(b, vocabulary)

    def _columns(self, sites: Sequence[Site], prints: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
        """Return one number per site and property, equal for equal properties, 0 for an unknown one.

        The shape of a module is that of its own parameters, each taken both ways round.
        """
        owned = _own_parameters(sites)
        rows = [
            (
                self._code(("role", site.role, bool(_ORPHAN.match(site.name)))),
                self._code(("name", unwrap(site.name))),
                self._code(("own", own_name(site.name))),
                self._code(("kind", short_type(site.type)) if site.role == "module" and site.type else None),
                self._code(_shape_of(site, owned)),
                self._code(_turned_shape(site)),
                self._code(("print", prints[site.name]) if site.name in prints else None),
                int(own_name(site.name).isdigit()),
            )
            for site in sites
        ]
        table = np.array(rows, np.int64).reshape(len(rows), 8)
        keys = ("role", "name", "own", "kind", "shape", "turned", "print", "number")
        return {key: table[:, index] for index, key in enumerate(keys)}

    def _code(self, value: object) -> int:
        return 0 if value is None else self._codes.setdefault(value, len(self._codes) + 1)

    def score(self, i: int, right: Sequence[int], *, place: float) -> NDArray[np.float64]:
        """Return the points of a left site, at ``place`` (0 to 1) of its row, with each of a row of right ones."""
        other = np.asarray(right)
        points = np.full(len(other), NEEDED)
        points += np.where(self._equal("name", i, other), EQUAL_NAME, 0.0)
        points += np.where(self._equal("own", i, other), EQUAL_OWN_NAME, 0.0)
        points += self._agree("kind", i, other, equal=EQUAL_KIND, unequal=OTHER_KIND)
        points += self._agree("print", i, other, equal=EQUAL_FINGERPRINT, unequal=OTHER_FINGERPRINT)
        points += self._shapes(i, other)
        points += np.where(self._is_other_at_number(i, other), OTHER_AT_NUMBER, 0.0)
        points += EQUAL_WORDS * self._share_words(i, other)
        points += DISTANCE * np.abs(np.arange(len(other)) / len(other) - place)
        return np.where(self._equal("role", i, other), points, -np.inf)

    def _is_other_at_number(self, i: int, other: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which sites have the same number in a sequence and are of another kind."""
        kinds = self._right["kind"][other]
        is_other = (kinds != self._left["kind"][i]) & (kinds != 0) & bool(self._left["kind"][i])
        return np.asarray(is_other & self._equal("name", i, other) & bool(self._left["number"][i]))

    def _equal(self, key: str, i: int, other: NDArray[np.int64]) -> NDArray[np.bool_]:
        mine = self._left[key][i]
        return np.asarray((self._right[key][other] == mine) & (mine != 0))

    def _agree(
        self, key: str, i: int, other: NDArray[np.int64], *, equal: float, unequal: float
    ) -> NDArray[np.float64]:
        known = (self._right[key][other] != 0) & (self._left[key][i] != 0)
        return np.where(self._equal(key, i, other), equal, np.where(known, unequal, 0.0))

    def _shapes(self, i: int, other: NDArray[np.int64]) -> NDArray[np.float64]:
        points = self._agree("shape", i, other, equal=EQUAL_SHAPE, unequal=OTHER_SHAPE)
        turned = (self._right["turned"][other] == self._left["shape"][i]) & (self._left["shape"][i] != 0)
        return np.where(turned & ~self._equal("shape", i, other), TURNED_SHAPE, points)

    def _share_words(self, i: int, other: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share of the words of two names that both have."""
        common = self._right_words[other] @ self._left_words[i]
        total = self._right_words[other].sum(axis=1) + self._left_words[i].sum() - common
        return np.where(total > 0, common / np.maximum(total, 1.0), 0.0)

    def is_same(self, i: int, j: int) -> bool:
        """Whether nothing speaks against two sites of one name: kind, shape and contents agree where known."""
        for key in ("kind", "shape", "print"):
            mine, other = self._left[key][i], self._right[key][j]
            if mine and other and mine != other:
                return False
        return bool(self._left["role"][i] == self._right["role"][j])

    def is_kin(self, i: int, j: int) -> bool:
        """Whether two sites can be one place: role and kind agree, and the shape of a tensor does."""
        for key in ("kind", "role"):
            mine, other = self._left[key][i], self._right[key][j]
            if mine and other and mine != other:
                return False
        return bool(self._left["kind"][i]) or self.is_possible(i, j)

    def is_possible(self, i: int, j: int) -> bool:
        """Whether two parameters of paired modules can be one: equal or turned shapes, where known."""
        mine, other = self._left["shape"][i], self._right["shape"][j]
        return bool(not mine or not other or mine == other or mine == self._right["turned"][j])


def _turned_shape(site: Site) -> object:
    """Return the shape that another framework gives the same numbers: a matrix turned, a kernel with space last."""
    if not _is_tensor(site) or len(site.shape) < 2:
        return None
    if len(site.shape) > 2 and site.name.rpartition(".")[2] == "kernel":
        return ("shape", (site.shape[-1], site.shape[-2], *site.shape[:-2]))
    if len(site.shape) > 2:
        return ("shape", (*site.shape[2:], site.shape[1], site.shape[0]))
    return ("shape", site.shape[::-1])


def _is_tensor(site: Site) -> bool:
    return site.role != "module"


def _shape_of(site: Site, owned: Mapping[str, list[object]]) -> object:
    """Return what stands for the shape of a site; None when it is unknown, as for a module without parameters."""
    if _is_tensor(site):
        return ("shape", site.shape) if site.shape else None
    parameters = owned.get(unwrap(site.name))
    return ("owns", tuple(sorted(parameters, key=str))) if parameters else None


def _own_parameters(sites: Sequence[Site]) -> dict[str, list[object]]:
    """Return name and shape of the parameters directly below each module, the shape in no particular order."""
    table: dict[str, list[object]] = defaultdict(list)
    for site in sites:
        if site.role == "parameter":
            parent = unwrap(site.name).rpartition(".")[0]
            table[parent].append((own_name(site.name), tuple(sorted(site.shape))))
    return table


def _all_words(sites: Sequence[Site]) -> set[str]:
    return {word for site in sites for word in words_of(site.name)}


def _word_table(sites: Sequence[Site], vocabulary: Mapping[str, int]) -> NDArray[np.float32]:
    table = np.zeros((len(sites), len(vocabulary)), np.float32)
    for row, site in enumerate(sites):
        table[row, [vocabulary[word] for word in words_of(site.name)]] = 1.0
    return table
