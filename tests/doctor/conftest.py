"""A training function run under a watch, judged live and again from its folder."""

import contextlib
import gc
import json

import pytest
import torch
import torch._dynamo  # wraps torch.manual_seed when first imported, which is not of our doing

import clew
from clew.store.findings import read_findings


class Judged:
    """What the doctor said of one training."""

    def __init__(self, diagnosis, path):
        self.diagnosis = diagnosis
        self.path = path
        self.causes = {finding.id: finding for finding in diagnosis.findings}

    @property
    def ids(self):
        """The causes, consequences left out."""
        return [finding.id for finding in self.diagnosis.findings if finding.severity != "info"]

    @property
    def all_ids(self):
        """Causes and consequences."""
        return {each.id for finding in self.diagnosis.findings for each in (finding, *finding.explains)}

    @property
    def errors(self):
        return [finding.id for finding in self.diagnosis.findings if finding.severity == "error"]

    def __getitem__(self, id):
        return self.causes[id]

    def __repr__(self):
        return json.dumps([finding.to_json() for finding in self.diagnosis.findings], indent=1, default=str)


@pytest.fixture
def judge(tmp_path, capsys):
    """Return a function that trains under a watch and gives the diagnosis, the same live and stored."""
    numbers = iter(range(1000))

    def run(train, *args, error=None, **settings):
        gc.collect()  # optimizers of earlier tests would be found and taken for part of this one
        torch.manual_seed(0)
        watch = clew.watch(
            out=str(tmp_path / "runs"),
            name=f"run{next(numbers)}",
            **{"budget": "off", "snapshots": "off", **settings},
        )
        with contextlib.suppress(*([error] if error else [])), watch:
            train(*args)
        judged = Judged(clew.diagnose(str(watch.path)), watch.path)
        judged.live = read_findings(watch.path / "rank0")
        live = [finding["id"] for finding in judged.live if not finding["rule"].startswith("watch ")]
        stored = [finding.id for finding in judged.diagnosis.findings]
        if settings.get("doctor") is False:
            return judged
        assert live == stored, "the doctor says the same while the run goes on and afterwards"
        return judged

    return run
