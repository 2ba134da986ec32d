"""Patterns of sites that fit nothing are told, with the nearest name: a typing error must not cost a record."""

import pytest
import torch

import clew


@pytest.mark.parametrize(
    ("sites", "notes"),
    [
        ("laeyrs.*", ["no site fits 'laeyrs.*'; did you mean 'layers'?"]),
        ("layers.*,zzz", ["no site fits 'zzz'"]),
        ("layers.*,!zzz", []),
        ("*", []),
    ],
)
def test_pattern_that_fits_no_site_is_told(sites, notes, tmp_path):
    model = torch.nn.ModuleDict({"layers": torch.nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with clew.watch(model, optimizer, out=str(tmp_path), name="run", sites=sites):
        model["layers"](torch.ones(2, 3)).sum().backward()
        optimizer.step()
    told = clew.open_run(tmp_path / "run").info.notes
    assert [note for note in told if note.startswith("no site")] == notes
