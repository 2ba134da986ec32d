"""The trainings that the doctor is tried on: those of its tests, strange but right ones and one fault in each other.

A test of a fault is parametrized with its spellings; the table says which rule names it and how a spelling is started.
Faults that take several processes, a clock of their own or a number that the user declares stay with the tests: P04,
T03 and X01 to X06.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TESTS = Path(__file__).parent.parent / "tests" / "doctor"
_HEALTHY = ("healthy_games", "healthy_steps", "healthy_data")
_RIGHT = (
    ("test_loop_coverage", "test_right_loops"),
    ("test_loop_data", "test_right_data"),
    ("test_loop_gradients", "test_right_loops"),
    ("test_loop_loss", "test_right_losses"),
    ("test_loop_modes", "test_right_modes"),
    ("test_loop_schedule", "test_right_schedules"),
    ("test_loop_targets", "test_right_targets"),
    ("test_nonfinite_rules", "test_legal_infinities_and_handled_nans_are_silent"),
    ("test_update_rules", "test_rates_that_touch_zero"),
    ("test_loop_raw_tensors", "test_tensors_that_nobody_has_forgotten"),
)


class Training(NamedTuple):
    """One training: the rule that names its fault (none for a healthy one), its name, and how it is run in a folder."""

    id: str
    name: str
    run: Callable[[Path], Any]


class _Spelling(NamedTuple):
    module: Any
    name: str
    value: Any
    folder: Path


def _with(*args: Any) -> Callable[[_Spelling], Any]:
    return lambda spelling: spelling.value(*args)


def _optimize(make: Any) -> Callable[[_Spelling], Any]:
    def run(spelling: _Spelling) -> None:
        model = spelling.value()
        spelling.module.train(model, make(model.parameters(), lr=1e-2))

    return run


_FAULTS: dict[str, dict[str, tuple[str, Callable[[_Spelling], Any]]]] = {
    "test_activation_rules": {
        "test_dead": ("M11", _with(-50.0)),
        "test_saturated": ("M12", _with(100.0)),
        "test_collapsed": ("M20", _with(True)),
        "test_unscaled": ("D07", _with(True)),
        "test_scaled_twice": ("D08", _with(True)),
    },
    "test_loop_coverage": {
        "test_parameter_not_optimized": ("M01", _with()),
        "test_optimizer_holds_dead_parameters": ("M02", _with()),
        "test_unused_layer": ("M03", _optimize(torch.optim.Adam)),
        "test_unregistered_module": ("M04", _optimize(torch.optim.SGD)),
        "test_nothing_trainable": ("M05", _with()),
        "test_graph_cut": ("L08", _optimize(torch.optim.Adam)),
    },
    "test_loop_data": {
        "test_identical_samples": ("D03", _with()),
        "test_same_batch_every_step": ("D04", _with()),
        "test_workers_share_randomness": ("D05", _with()),
        "test_train_eval_overlap": ("D10", _with()),
        "test_unshuffled_data": ("D11", _with()),
        "test_batch_size_mismatch": ("D17", _with()),
    },
    "test_loop_gradients": {
        "test_missing_zero_grad": ("O01", _with()),
        "test_gradients_erased": ("O02", _with()),
        "test_step_before_backward": ("O03", _with()),
        "test_double_step": ("O04", _with()),
        "test_clip_sees_no_gradients": ("O13", _with()),
    },
    "test_loop_loss": {
        "test_wrong_input": ("", _with()),
        "test_broadcast_by_hand": ("L05", _with()),
        "test_broadcast_in_a_loss_of_torch": ("L05", lambda each: each.module.broadcast_in(each.value)),
        "test_detached_loss": ("L06", _with()),
        "test_one_class": ("L07", _with()),
        "test_maximising": ("L10", _with()),
    },
    "test_loop_modes": {
        "test_training_in_eval_mode": ("M06", _with()),
        "test_validation_in_train_mode": ("M07", _with()),
        "test_dropout_in_eval": (
            "M08",
            lambda each: each.module.epochs(
                each.module.Functional(each.value), evaluate=each.module.eval_and_back
            ),
        ),
        "test_extreme_dropout": ("M16", _with()),
        "test_batchnorm_on_tiny_batches": ("M19", _with()),
        "test_spectral_norm_before_training": (
            "M22",
            lambda each: each.module.spectral(each.name, torch.nn.utils.spectral_norm),
        ),
        "test_evaluation_builds_graph": ("T02", _with()),
    },
    "test_loop_raw_tensors": {
        "test_a_tensor_that_no_optimizer_holds": ("M01", _with(False)),
    },
    "test_loop_schedule": {
        "test_scheduler_before_optimizer": ("O05", _with()),
        "test_epoch_schedule_per_batch": ("O06", _with()),
        "test_optimizer_recreated": ("O15", _with()),
        "test_reseeding_in_loop": ("P09", _with()),
        "test_scaler_misuse": ("N05", _with()),
        "test_half_precision_adam_eps": ("N10", _with()),
        "test_slow_debug_setting": ("T05", _with()),
    },
    "test_loop_targets": {
        "test_the_exception_is_translated": ("D02", _with()),
        "test_binary_targets_out_of_range": ("D02", _with()),
        "test_all_targets_ignored": ("D13", lambda each: each.value[0]()),
        "test_unshifted_targets": ("D15", _with()),
    },
    "test_loop_weights": {
        "test_symmetric_weights": ("M13", _with()),
        "test_checkpoint_not_loaded": ("M14", lambda each: each.value(each.folder)),
        "test_stale_checkpoint": ("P05", lambda each: each.value(each.folder / "saved.pt")),
        "test_batch_mixing": ("M09", _with()),
        "test_future_leak": ("M18", _with()),
    },
    "test_loop_written_out": {
        "test_a_likelihood_that_is_made_smaller": ("L10", lambda each: each.module.train(each.value)),
        "test_a_loss_of_new_tensors": ("L06", lambda each: each.module.train(each.value)),
        "test_probabilities_by_their_numbers": ("", lambda each: each.module.train(each.value)),
    },
    "test_nonfinite_rules": {
        "test_a_bad_batch_is_the_cause": ("D01", _with()),
        "test_forward": ("N01", _with()),
        "test_backward": ("N02", _with()),
        "test_parameters": ("N03", _with(0.0)),
        "test_a_scaler_that_skips": ("N04", _with()),
        "test_half_overflow": ("N07", lambda each: each.module.in_half(each.value[1], each.value[0])),
    },
    "test_progress_rules": {
        "test_initial_loss": ("L11", _with(True)),
        "test_uninformative": ("D06", _with(True)),
        "test_stuck": ("V02", _with(True)),
        "test_spike": ("V03", _with(True)),
        "test_overfitting": ("V01", lambda each: each.module.overfit(True, how=each.value)),
        "test_vanishing": ("N08", _with(True)),
        "test_exploding": ("N06", lambda each: each.module.exploding(True, model=each.value())),
    },
    "test_timing_rules": {
        "test_waiting_for_data": ("T01", _with(lambda: time.sleep(0.03))),
        "test_compiled_again_and_again": ("T04", _with(range(16, 23))),
        "test_underflow": ("N09", _with(1e-5)),
    },
    "test_update_rules": {
        "test_zero_rate": ("O07", _with()),
        "test_too_high": ("O08", _with(True)),
        "test_too_low": ("O09", _with(1e-8)),
        "test_lost_to_precision": ("O10", _with(torch.bfloat16)),
        "test_unchanged": ("O11", _with(False)),
        "test_clipping": ("O12", _with(False)),
    },
}
"""By test: the rule that names the fault, and how a spelling becomes a training with it."""


def list_healthy() -> list[Training]:
    """Return the trainings on which a doctor has nothing to say."""
    _find_tests()
    for module in _HEALTHY:
        importlib.import_module(module)
    loops = importlib.import_module("healthy_loops").LOOPS
    whole = [Training("", name, lambda _, loop=loop: loop()) for name, loop in loops.items()]
    right = [each for module, test in _RIGHT for each in _list_test(module, test, "", _with())]
    saving = _list_test("test_loop_weights", "test_right_weights", "", lambda each: each.value(each.folder))
    return [*whole, *right, *saving]


def list_faulty() -> list[Training]:
    """Return the trainings with a fault, in several spellings for each rule."""
    _find_tests()
    return [
        training
        for module, tests in _FAULTS.items()
        for test, (id, start) in tests.items()
        for training in _list_test(module, test, id, start)
    ]


def _find_tests() -> None:
    if str(_TESTS) not in sys.path:
        sys.path.insert(0, str(_TESTS))


def _list_test(module_name: str, test: str, id: str, start: Callable[[_Spelling], Any]) -> Iterator[Training]:
    """Give one training for each parameter of a test."""
    module = importlib.import_module(module_name)
    marks = getattr(module, test).pytestmark
    values = next(mark.args[1] for mark in marks if mark.name == "parametrize")
    pairs = values.items() if isinstance(values, dict) else ((_name(each), each) for each in values)
    for name, value in pairs:
        own, plain = id, value
        if isinstance(value, tuple) and value[0] == name:
            own, plain = value  # a pair of the rule and the spelling
        elif callable(name):
            own, plain = value, name  # a table of spellings and their rules
        yield Training(
            own,
            f"{test.removeprefix('test_')}: {_name(name)}",
            lambda folder, name=name, plain=plain: start(_Spelling(module, name, plain, folder)),
        )


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value[0] if isinstance(value, tuple) else getattr(value, "__name__", type(value).__name__))
