"""What the doctor makes of parameters that no optimizer holds."""

import torch
from loops import blobs, fit
from torch import nn

import clew
from clew.views.block import Callout
from clew.views.run_page import make_page


def test_a_weight_whose_gradient_is_mostly_zero_is_named_beside_its_bias(judge):
    def forget_a_layer_behind_dead_units():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()

    finding = judge(forget_a_layer_behind_dead_units)["M01"]
    assert finding.evidence["parameters"] == 2
    assert finding.hint.startswith("2.weight, 2.bias must be given")


def test_a_frozen_mask_and_a_frozen_body_cause_no_finding(judge):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)
            upper = torch.full((8, 8), -torch.inf).triu(1)
            self.mask = nn.Parameter(upper, requires_grad=False)

        def forward(self, x):
            weights = (self.body.weight + self.mask).softmax(-1)
            return self.head(self.body(x) @ weights)

    def train_a_head():
        torch.manual_seed(0)
        model, (x, y) = Masked(), blobs()
        fit(model, (x, y), optimizer=torch.optim.Adam(model.head.parameters(), 1e-2), steps=24)

    judged = judge(train_a_head)
    assert judged.all_ids == set(), judged
    run = clew.open_run(judged.path)
    assert run.series("mask", "param", "neg_inf").values.tolist() == [28.0]
    assert not any(
        isinstance(block, Callout) and block.severity == "error" for block in make_page(run).blocks
    )
