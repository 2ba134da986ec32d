"""A sink that keeps everything in memory, and a recording around a few lines of training."""

import contextlib
import gc
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch._dynamo  # noqa: F401 - wraps torch.manual_seed when first imported, which is not of our doing

from clew.capture.settings import Settings
from clew.capture.torch import uncompiled
from clew.capture.torch.session import TorchSession
from clew.model.record import StepRecord
from clew.model.schema import KINDS, STAT_INDEX


@dataclass
class Memory:
    """What a recording left: records in order, sites by number."""

    sites: dict = field(default_factory=dict)
    records: list = field(default_factory=list)

    def add_sites(self, sites):
        self.sites.update({site.id: site for site in sites})

    def put(self, record):
        self.records.append(record)

    def update_info(self, info):
        pass

    def close(self, state, exit_code=None):
        pass

    def rows(self, *, kind=None, step=None, site=None):
        """Return (step, site, kind, ordinal, mode, stats) of the rows that fit, in order."""
        found = []
        for record in self.records:
            for row in range(len(record)):
                name, word = self.sites[int(record.sites[row])].name, KINDS[record.kinds[row]]
                if kind in (None, word) and step in (None, record.step) and site in (None, name):
                    stats = {stat: record.values[row][index] for stat, index in STAT_INDEX.items()}
                    found.append(
                        (record.step, name, word, int(record.ordinals[row]), int(record.modes[row]), stats)
                    )
        return found

    def assert_no_row_twice(self):
        """Whatever the loop: step, site, kind, mode and ordinal are the key of a row."""
        for record in self.records:
            if isinstance(record, StepRecord):
                keys = Counter(zip(record.sites, record.kinds, record.modes, record.ordinals, strict=True))
                assert max(keys.values(), default=1) == 1, (record.step, keys.most_common(3))

    def names(self, **which):
        return [row[1] for row in self.rows(**which)]

    def stats(self, **which):
        return [row[5] for row in self.rows(**which)]

    def steps_of(self, site, kind):
        """Return the steps in which a site has a row."""
        return [row[0] for row in self.rows(site=site, kind=kind)]

    def scalars(self, name):
        return [(r.step, s.value) for r in self.records for s in r.scalars if s.name == name]

    @property
    def steps(self):
        return [record.step for record in self.records]


@pytest.fixture
def record():
    """Return a context manager: everything inside is recorded, the result is a Memory."""

    @contextlib.contextmanager
    def recording(*models, optimizers=(), told=None, **settings):
        gc.collect()  # optimizers of earlier tests would be found and taken for part of this one
        memory = Memory()
        said = told if told is not None else []
        session = TorchSession(
            Settings(**{"budget": None, **settings}),
            memory,
            tell=said.append,
            models=[(f"m{index}", model) for index, model in enumerate(models)],
            optimizers=optimizers,
        )
        memory.session = session
        session.start()
        try:
            yield memory
        finally:
            session.finish()
        memory.assert_no_row_twice()

    return recording


@pytest.fixture
def nothing_was_compiled(monkeypatch):
    """Have gates although other tests of this process may have compiled; they must find no optimizer of ours."""
    monkeypatch.setattr(uncompiled, "_has_compiled", lambda: False)
    yield
    gc.collect()
