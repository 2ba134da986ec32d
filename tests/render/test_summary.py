import math
from pathlib import Path

from clew.render.summary import format_summary


def test_the_end_of_a_run_says_path_trouble_cost_and_next_command():
    text = format_summary(
        Path("runs/20261115-142501-train"),
        steps=1412,
        recorded_steps=300,
        loss=math.nan,
        worst_site="layers.3 (NaN in grad_output at step 12)",
        cost_share=0.024,
        size_bytes=3_100_000,
        faults=1,
    )
    assert text == (
        "clew: recorded runs/20261115-142501-train, 3.10 MB\n"
        "clew: 1,412 steps, 300 of them in full, last loss NaN, cost of clew 2.4 %\n"
        "clew: worst site: layers.3 (NaN in grad_output at step 12)\n"
        "clew: 1 fault inside clew itself; training was not touched\n"
        "clew: next: clew show 20261115-142501-train\n"
    )


def test_what_is_not_known_is_not_said():
    assert (
        format_summary(Path("runs/a"), steps=1)
        == "clew: recorded runs/a\nclew: 1 step\nclew: next: clew show a\n"
    )


def test_steps_of_which_nothing_was_measured_are_not_called_recorded_in_full():
    assert "clew: 21 steps, no statistics of them\n" in format_summary(
        Path("runs/a"), steps=21, recorded_steps=0
    )


def test_a_run_without_a_step_says_where_to_start_clew():
    text = format_summary(Path("runs/a"), steps=0)
    assert "clew: no model was called in this process" in text
    assert "torchrun … -m clew run train.py" in text


def test_what_to_type_next_leads_to_a_run_in_any_folder():
    assert format_summary(Path("runs/a"), steps=1).endswith("clew: next: clew show a\n")
    assert format_summary(Path("build/demo/a"), steps=1).endswith("clew: next: clew show build/demo/a\n")


def test_what_came_after_the_last_step_is_said_and_not_counted():
    for rest, words in (
        ("evaluation", "3 steps and an evaluation"),
        ("step", "3 steps and one that did not end"),
    ):
        assert f"clew: {words}\n" in format_summary(Path("runs/a"), steps=3, rest=rest)
    assert "no model was called" not in format_summary(Path("runs/a"), steps=0, rest="evaluation")


def test_the_cost_of_a_short_run_is_put_into_proportion():
    short = format_summary(Path("runs/a"), steps=12, cost_share=3.01)
    assert "12 steps, cost of clew 301.0 % (a short run: the first steps are recorded in full)\n" in short
    assert "short run" not in format_summary(Path("runs/a"), steps=1200, cost_share=3.01)
    assert "short run" not in format_summary(Path("runs/a"), steps=12, cost_share=0.02)
