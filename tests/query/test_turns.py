"""Optimizers that take turns: each has a loss of its own, and what the page shows is of all of them."""

import torch

import clew
from clew.render.terminal import Screen, lower
from clew.views.run_page import make_page


def train_gan(folder, *, turns=4):
    """Record a GAN whose discriminator has two losses and two steps in each turn."""
    g, d = torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizers = {"d": torch.optim.SGD(d.parameters(), lr=0.1), "g": torch.optim.SGD(g.parameters(), lr=0.2)}
    with clew.watch({"g": g, "d": d}, out=folder, name="gan", budget="off", snapshots="off") as run:
        for _ in range(turns):
            for name in ("d", "d", "g"):
                optimizers[name].zero_grad()
                (d(g(torch.ones(4, 3))).mean() * 0 + (1.0 if name == "d" else 3.0)).backward()
                if name == "d":
                    (d(torch.ones(4, 2)).mean() * 0 + 2.0).backward()
                optimizers[name].step()
    return clew.open_run(run.path)


def draw_page(run):
    return lower(make_page(run), Screen(width=80))


def test_losses_are_told_apart_by_what_is_trained(tmp_path):
    run = train_gan(tmp_path)
    losses = run.losses()
    assert list(losses) == ["loss of d", "loss[1] of d", "loss of g"]
    assert losses["loss of d"].steps.tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert losses["loss of g"].steps.tolist() == [2, 5, 8, 11]
    assert [set(each.values.tolist()) for each in losses.values()] == [{1.0}, {2.0}, {3.0}]
    assert len(run.scalars("loss")["loss"]) == 12
    assert [line.name for line in clew.plot(run).lines] == ["loss of d", "loss of g"]
    assert [line.name for line in clew.plot(run, scalar="loss[1] of d").lines] == ["loss[1] of d"]
    page = draw_page(run)
    assert "last loss of g" in page
    rows = {
        line.split()[0]: line.split() for line in page.splitlines() if line.split()[:1] in (["g"], ["d.0"])
    }
    assert all("-" not in row for row in rows.values())
    assert set(rows) == {"g", "d.0"}


def test_one_optimizer_after_another_goes_on_with_the_loss(tmp_path):
    """A change for good may be a warm-up; only those that take turns play two games."""
    assert list(train_gan(tmp_path, turns=1).losses()) == ["loss", "loss[1]"]


def test_a_module_with_several_outputs_shows_the_first(tmp_path):
    model = torch.nn.GRU(2, 3)
    with clew.watch(model, out=tmp_path, name="gru", budget="off", snapshots="off") as run:
        model(torch.randn(4, 1, 2))[0].sum().backward()
    page = draw_page(clew.open_run(run.path))
    (row,) = [line.split() for line in page.splitlines() if line.startswith("  (model) ")]
    assert float(row[2]) > 0
