"""A step executed again must draw the same numbers."""

import random

import numpy as np
import torch

from clew.capture.torch.randomness import RandomStates


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        random.gauss(0, 1),
        float(np.random.rand()),
        np.random.randint(0, 100, 5).tolist(),
        torch.rand(3).tolist(),
    ]


def test_the_states_come_back_exactly():
    states = RandomStates()
    for _ in range(3):
        random.gauss(0, 1)
        states.take()
        first = draw()
        second = draw()
        states.restore()
        assert draw() == first
        assert draw() == second != first


def test_taking_them_changes_nothing():
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    RandomStates().take()
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before
