"""Clipping and loss scaling, however they are called: the norm before clipping, the scale, the steps left out."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm


def _train(model, optimizer, clip):
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        norms.append(float(clip(model)))
        optimizer.step()
    return norms


def _clip_in_two_parts(model):
    norm = get_total_norm([parameter.grad for parameter in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), 0.01, norm)
    return norm


CLIPS = {
    "imported before": lambda model: clip_grad_norm_(model.parameters(), 0.01),
    "by keyword": lambda model: clip_grad_norm_(parameters=model.parameters(), max_norm=0.01),
    "through the package": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "in two parts": _clip_in_two_parts,
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_norm_before_clipping_is_seen_once(clip, record):
    model = torch.nn.Linear(3, 2)
    with record(model) as memory:
        norms = _train(model, torch.optim.SGD(model.parameters(), 0.1), clip)
    assert [value for _, value in memory.scalars("clip.norm_before")] == pytest.approx(norms)
    assert memory.scalars("clip.limit") == [(step, 0.01) for step in range(3)]
    assert torch.nn.utils.clip_grads_with_norm_ is clip_grads_with_norm_


class Wrapper:
    """Looks like an optimizer and is none: passes everything on to the one inside."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, *args, **kwargs):
        return self.inner.step(*args, **kwargs)


OPTIMIZERS = {
    "plain": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "fused": lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True),
    "wrapped": lambda parameters: Wrapper(torch.optim.SGD(parameters, 0.1)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_left_out_steps_of_any_optimizer_are_told(make, record):
    model = torch.nn.Linear(3, 2)
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    with record(model) as memory:
        for step in range(3):
            model.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean() * (1e38 if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert memory.scalars("scaler.skipped") == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert memory.scalars("scaler.scale") == [(0, 4.0), (1, 4.0), (2, 2.0)]
    assert set(memory.names(kind="param")) == {"weight", "bias"}
    assert [step for step, _ in memory.scalars("lr")] == [0, 1, 2]


def test_gradients_of_a_fused_optimizer_are_told_without_the_scale(record):
    """It takes the scale off by itself, inside its step: no gradient of the program ever is without it."""

    def train(**options):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer, scaler = torch.optim.Adam(model.parameters(), 0.1, **options), torch.amp.GradScaler("cpu")
        with record(model) as memory:
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        return [row[-1] for row in memory.rows(kind="grad")]

    fused, plain = train(fused=True), train(fused=False)
    assert len(fused) == len(plain) == 6
    for one, other in zip(fused, plain, strict=True):
        assert one == pytest.approx(other, nan_ok=True)
