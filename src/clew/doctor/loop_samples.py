"""Outputs that depend on what they must not know: other samples, later tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.doctor.rule import Found, NotJudged, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clew.doctor.case import Case

_MOVED: Final = 1e-3


def _answers(case: Case, question: str) -> list[dict[str, Any]]:
    """Return what a model did with changed inputs; raises where it was not asked."""
    notes = [note for note in case.noted("changed-input") if note.get(question) is not None]
    if not notes:
        why = "no model was run again with changed inputs"
        if question == "leak":
            why = "no language model whose targets are its next tokens was run again with a changed token"
        raise NotJudged(why)
    return notes


@rule(
    "M09",
    "batch-mixing",
    severity="warning",
    watches="the output for one sample when all others are replaced, in eval mode and in a copy of the process",
    threshold="moves by more than 0.1 %",
    silent="independent samples do not move it at all; graphs and sequences that come first are recognised",
    hint="look for reshape instead of permute, batch_first, and softmax over the wrong dimension",
    needs=("probe:again",),
    explains=("V01", "V02", "M20"),
)
def batch_mixing(case: Case) -> Iterator[Found]:
    """The samples of a batch influence each other."""
    for note in _answers(case, "mixing"):
        if note["mixing"] > _MOVED:
            yield Found(
                0,
                site=note["site"],
                evidence={
                    "output_moves_by": f"{note['mixing']:.2g} of its size when all other samples are replaced"
                },
                source=note.get("source", ""),
                hint=f"the output of {note['site'] or 'the model'} for a sample depends on the others: look for "
                "view where permute is meant, batch_first=True, and softmax or normalisation over dimension 0",
            )
            return


@rule(
    "M18",
    "future-leak",
    severity="error",
    watches="the outputs of a causal language model when its last token is another one, in a copy of the process",
    threshold="earlier outputs move by more than 0.1 %",
    silent="in a causal model they do not move at all",
    hint="add a causal mask",
    needs=("probe:again",),
    explains=("V01",),
)
def future_leak(case: Case) -> Iterator[Found]:
    """A model that predicts the next token sees it."""
    for note in _answers(case, "leak"):
        if note["leak"] > _MOVED:
            yield Found(
                0,
                site=note["site"],
                evidence={
                    "output_moves_by": f"{note['leak']:.2g} of its size when a later token is replaced"
                },
                source=note.get("source", ""),
                hint="outputs change with tokens that come later: give the attention a causal mask, make the "
                "recurrent layer one-directional, or pad the convolution on the left only",
            )
            return
