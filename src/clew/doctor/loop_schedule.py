"""What happens at the wrong moment or too often: schedules, optimizers, seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clew.doctor.loop_words import said_at
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case


@rule(
    "O05",
    "scheduler-before-optimizer",
    severity="warning",
    watches="the first step of a learning-rate schedule and of its optimizer",
    threshold="the schedule steps once before its optimizer's first step",
    silent="a schedule that is wound forward before a training goes on takes several steps at once",
    hint="call scheduler.step() after optimizer.step()",
    needs=("probe:schedule", "optimizer"),
)
def scheduler_before_optimizer(case: Case) -> Iterator[Found]:
    """The learning-rate schedule steps before the optimizer."""
    for note in case.noted("early-schedule"):
        yield Found(
            int(note["step"]),
            evidence={"scheduler": note["scheduler"], "optimizer": note["optimizer"]},
            source=note["source"],
            hint=f"move {note['scheduler']}.step(){said_at(note['source'])} behind {note['optimizer']}.step(): the "
            "first learning rate is skipped",
        )
        return


@rule(
    "O06",
    "epoch-schedule-per-batch",
    severity="warning",
    watches="steps of a schedule, steps of its optimizer, and the batches of an epoch",
    threshold="stepped with every batch, and over within half an epoch",
    silent="schedules that are meant for steps last an epoch or longer; those made for batches are left out",
    hint="step the schedule once an epoch, or give it its length in steps",
    needs=("probe:schedule", "optimizer"),
    explains=("O07", "O09", "V02", "O10", "O11"),
)
def epoch_schedule_per_batch(case: Case) -> Iterator[Found]:
    """A schedule that counts epochs is stepped with every batch."""
    for note in case.noted("schedule-per-batch"):
        yield Found(
            0,
            evidence={
                "scheduler": note["scheduler"],
                "period": note["period"],
                "steps_per_epoch": note["steps_per_epoch"],
                "schedule_steps": note["schedule_steps"],
                "optimizer_steps": note["optimizer_steps"],
            },
            source=note["source"],
            hint=f"{note['scheduler']} has run its course after {note['period']} steps, an epoch has "
            f"{note['steps_per_epoch']}: move scheduler.step(){said_at(note['source'])} out of the loop over batches, "
            "or give it its length in steps",
        )
        return


@rule(
    "O15",
    "optimizer-recreated",
    severity="warning",
    watches="optimizers of one class that one line makes for the same parameters",
    threshold="the fourth, each of the earlier ones having stepped, the weights untouched in between",
    silent="phases of a training make two or three, or other ones; a new task begins with other weights",
    hint="make the optimizer once, before the loop",
    needs=("probe:repeats", "optimizer"),
)
def optimizer_recreated(case: Case) -> Iterator[Found]:
    """The optimizer is made again and again."""
    for note in case.noted("optimizer-again"):
        yield Found(
            int(note["step"]),
            evidence={"optimizer": note["optimizer"], "times": note["made_times"]},
            source=note["made"],
            hint=f"{note['type']} is made{said_at(note['made'])} again while training: its momentum and moments start "
            "from nothing each time; make it once, before the loop",
        )
        return


@rule(
    "P09",
    "reseeding-in-loop",
    severity="warning",
    watches="seeds that are set after training has begun",
    threshold="the same seed before training in 4 steps",
    silent="seeds that change with the step, and those set aside by fork_rng, do no harm",
    hint="set the seed once, before the loop",
    needs=("probe:repeats",),
    explains=("D04", "V01"),
)
def reseeding_in_loop(case: Case) -> Iterator[Found]:
    """The random generator is set to the same seed again and again."""
    for note in case.noted("seed-again"):
        yield Found(
            int(note["step"]),
            evidence={"generator": note["generator"], "seed": note["seed"], "times": note["times"]},
            source=note["source"],
            hint=f"seed {note['seed']} is set{said_at(note['source'])} while training: each time the same order, "
            "noise and dropout; set it once, before the loop",
        )
        return
