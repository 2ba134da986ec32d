"""Losses that are put together wrongly: the wrong thing goes in, the wrong shape, the wrong sign, or nothing at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from clew.doctor.loop_words import said_at
from clew.doctor.rule import Found, rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from clew.doctor.case import Case

_TIMES: Final = 2
_SIGNED: Final = 3
_GIVEN: Final = {
    "Softmax": "the output of softmax",
    "LogSoftmax": "a log_softmax over another dimension than that of the classes",
}
_CONSEQUENCES: Final = ("L11", "V02", "D06", "M20", "V01")

Term = dict[str, Any]


def list_terms(case: Case) -> list[tuple[dict[str, Any], Term]]:
    """Return every term of every loss that was looked at, with its note."""
    return [(note, term) for note in case.noted("loss-head") for term in note["terms"]]


def find_often(case: Case, is_wrong: Callable[[Term], bool]) -> tuple[dict[str, Any], Term, int] | None:
    """Return the first note and term with a fault that several losses have, and how many."""
    found = [(note, term) for note, term in list_terms(case) if is_wrong(term)]
    notes = {id(note) for note, _ in found}
    if len(notes) < min(_TIMES, case.notes["loss-head"].total if found else _TIMES):
        return None
    note, term = found[0]
    return note, term, len(notes)


def find_given(case: Case, form: str) -> list[dict[str, Any]]:
    """Return the notes of losses of a form whose input is a probability by its numbers, if several have it."""
    found = [note for note in case.noted("loss-input") if note["form"] == form]
    return found if len(found) >= _TIMES else []


@rule(
    "L01",
    "softmax-before-cross-entropy",
    severity="error",
    watches="what enters the log-softmax of a loss",
    threshold="the output of a softmax or sigmoid, through reshaping only; 2 losses",
    silent="no right loss takes the softmax of probabilities",
    hint="give cross-entropy the scores themselves",
    needs=("probe:loss", "scalar:loss"),
    explains=_CONSEQUENCES,
)
def softmax_before_cross_entropy(case: Case) -> Iterator[Found]:
    """Cross-entropy is given probabilities instead of scores."""
    found = find_often(case, lambda t: t["form"] == "log_softmax" and t["above"] in ("Softmax", "Sigmoid"))
    given = find_given(case, "cross_entropy")
    if given and not found:
        yield Found(
            int(given[0]["step"]),
            evidence={"sum_of_each_row": 1.0, "classes": given[0]["classes"], "losses": len(given)},
            source=given[0]["source"],
            hint="the rows that cross_entropy is given add up to 1: they are probabilities. Give it the scores before "
            "they are normalised, or use nll_loss on their logarithm",
        )
    if found:
        note, term, times = found
        word = term["above"].lower()
        yield Found(
            int(note["step"]),
            evidence={"input": word, "classes": term["classes"], "losses": times},
            source=note["source"],
            hint=f"take the {word} out of the model: cross_entropy contains a log-softmax of its own",
        )


@rule(
    "L02",
    "nll-without-log",
    severity="error",
    watches="what enters a negative log-likelihood loss",
    threshold="no logarithm before it, and rows whose logsumexp is further than 0.01 from 0; 2 losses",
    silent="the exponentials of log-probabilities add up to 1 exactly",
    hint="use cross_entropy, or log_softmax before nll_loss",
    needs=("probe:loss", "scalar:loss"),
    explains=(*_CONSEQUENCES, "L10"),
)
def nll_without_log(case: Case) -> Iterator[Found]:
    """nll_loss is given something else than log-probabilities."""
    found = find_often(
        case,
        lambda t: t["form"] == "nll" and not t["is_log"] and t["deviation"] > 1e-2 and t["classes"] > 1,
    )
    if found:
        note, term, times = found
        given = _GIVEN.get(term["above"], "plain scores")
        yield Found(
            int(note["step"]),
            evidence={
                "logsumexp_of_a_row": round(term["deviation"], 3),
                "classes": term["classes"],
                "losses": times,
            },
            source=note["source"],
            hint=f"nll_loss is given {given}: use F.cross_entropy on the scores, or F.log_softmax before nll_loss",
        )
        return
    yield from _find_picked(case)


def _find_picked(case: Case) -> Iterator[Found]:
    """A likelihood written out without its logarithm: the score of the right class alone, which may grow for ever."""
    notes = case.noted("loss-head")
    picked = [term["sign"] for note in notes for term in note["terms"] if term["form"] == "picked"]
    if len(notes) < _SIGNED or len(picked) != len(notes) or min(picked) < 1:
        return
    if any(term.get("is_loss") for note in notes for term in note["terms"]) or not notes[0]["trained"]:
        return
    yield Found(
        int(notes[0]["step"]),
        evidence={"input": "plain scores", "losses": len(picked)},
        source=notes[0]["source"],
        hint="the loss is the mean score of the right class, which grows for ever: use F.cross_entropy(scores, "
        "labels), or F.log_softmax(scores, dim=-1) before one score is picked",
    )


_OF_SCORES: Final = ("bce_logits", "log_sigmoid", "soft_margin")
"""Losses that take a sigmoid of what they are given."""


@rule(
    "L03",
    "sigmoid-before-bce-logits",
    severity="error",
    watches="what enters binary cross-entropy with logits, a soft margin or a log-sigmoid",
    threshold="the output of a sigmoid or softmax; 2 losses",
    silent="the loss contains a sigmoid of its own: no right loss has two",
    hint="give the loss the scores themselves",
    needs=("probe:loss", "scalar:loss"),
    explains=_CONSEQUENCES,
)
def sigmoid_before_bce_logits(case: Case) -> Iterator[Found]:
    """Binary cross-entropy with logits is given probabilities."""
    found = find_often(case, lambda t: t["form"] in _OF_SCORES and t["above"] in ("Sigmoid", "Softmax"))
    given = find_given(case, "bce_logits")
    if given and not found:
        word = given[0]["above"]
        yield Found(
            int(given[0]["step"]),
            evidence={"made_of": f"{word} alone", "losses": len(given)},
            source=given[0]["source"],
            hint=f"all numbers that the loss is given come out of a {word} and lie between 0 and 1: use "
            "binary_cross_entropy without logits",
        )
    if found:
        note, term, times = found
        word = term["above"].lower()
        yield Found(
            int(note["step"]),
            evidence={"input": word, "losses": times},
            source=note["source"],
            hint=f"take the {word} out of the model: the loss has one of its own"
            + (" (or use binary_cross_entropy without logits)" if term["form"] == "bce_logits" else ""),
        )


@rule(
    "L04",
    "kl-input-not-log",
    severity="error",
    watches="the first argument of kl_div",
    threshold="a value above 0, or the output of a softmax; 2 losses",
    silent="log-probabilities are never above 0",
    hint="give kl_div log_softmax of the scores",
    needs=("probe:loss", "scalar:loss"),
    explains=(*_CONSEQUENCES, "L10", "O08"),
)
def kl_input_not_log(case: Case) -> Iterator[Found]:
    """kl_div is given probabilities or scores instead of log-probabilities."""
    found = find_often(case, lambda t: t["form"] == "kl" and t["is_positive"])
    given = find_given(case, "kl")
    if given and not found:
        is_swapped = given[0]["is_swapped"]
        yield Found(
            int(given[0]["step"]),
            evidence={"input": "positive numbers", "is_trained": not is_swapped, "losses": len(given)},
            source=given[0]["source"],
            hint="the arguments of kl_div are the other way round: F.kl_div(F.log_softmax(scores, dim=-1), targets)"
            if is_swapped
            else "the first argument of kl_div is in log space: give it F.log_softmax(scores, dim=-1)",
        )
    if found:
        note, term, times = found
        yield Found(
            int(note["step"]),
            evidence={"input": term["above"] or "scores", "losses": times},
            source=note["source"],
            hint="the first argument of kl_div is in log space: give it F.log_softmax(scores, dim=-1)",
        )


@rule(
    "L05",
    "loss-broadcast",
    severity="error",
    watches="the shapes that meet in a loss",
    threshold="the result is larger than both: (N, 1) and (N,) make (N, N); 2 losses",
    silent="in pairwise losses both sides have gradients, somewhere at least; a number for all samples grows nothing",
    hint="make the shapes equal",
    needs=("probe:loss", "scalar:loss"),
    explains=(*_CONSEQUENCES, "D17"),
)
def loss_broadcast(case: Case) -> Iterator[Found]:
    """Output and target are broadcast against each other in the loss."""
    if any(term["form"] == "pairs" for _, term in list_terms(case)):
        return
    found = find_often(case, lambda t: bool(t.get("grown")))
    if found:
        note, term, times = found
        shape = "x".join(map(str, term["shape"]))
        yield Found(
            int(note["step"]),
            evidence={
                "outputs": term["given"],
                "comparisons": term["grown"],
                "shape": shape,
                "losses": times,
            },
            source=note["source"],
            hint=f"{term['given']} losses are each multiplied by the weights of all samples ({shape}): "
            "use weights.squeeze(1), or weights[:, None] where the losses have a second dimension"
            if term.get("op") in ("Mul", "Div")
            else f"{term['given']} outputs are compared with every target ({shape}): "
            "use output.squeeze(1), or target.unsqueeze(1)",
        )


@rule(
    "L06",
    "detached-loss",
    severity="error",
    watches="the tensor that backward is called on",
    threshold="it was not computed from anything that is trained",
    silent="a loss that trains has a history",
    hint="call backward on the loss as it was computed",
    needs=("probe:loss",),
    explains=("M05", "L08", "M03", "M02", "M01", "O11", "O09", "V02", "D06", "O02", "O03"),
)
def detached_loss(case: Case) -> Iterator[Found]:
    """Backward is called on a loss that has no connection to the model."""
    for note in case.noted("loss-leaf"):
        if note["parameters"] and not note["trainable"]:
            return  # nothing can be trained: that is another fault
        if note.get("has_history") and not case.noted("no-gradients"):
            continue  # a loss of its own, such as that of a multiplier, beside one that trains the model
        where = (
            "it was computed under no_grad" if not note["grad_enabled"] else "look for .item(), .detach(), "
        )
        if note["grad_enabled"]:
            where += ".data, torch.tensor(loss) or no_grad"
        yield Found(
            int(note["step"]),
            evidence={"requires_grad": note["requires_grad"], "comes_from_a_model": False},
            source=note["source"],
            hint=f"the loss{said_at(note['source'])} does not come from the model: {where}",
        )
        return
    for note in case.noted("error"):
        if "has no attribute 'backward'" in note["message"]:
            yield Found(
                int(note["step"]),
                evidence={"error": note["message"]},
                source=note["source"],
                hint="the loss is a plain number: call backward before .item() or float()",
            )
            return


@rule(
    "L07",
    "one-class-cross-entropy",
    severity="error",
    watches="the number of classes in a cross-entropy",
    threshold="1",
    silent="with one class the loss is 0 whatever the model says",
    hint="use two outputs, or binary cross-entropy for one",
    needs=("probe:loss", "scalar:loss"),
    explains=(*_CONSEQUENCES, "O11", "N08", "O09", "M11", "D02", "L08"),
)
def one_class_cross_entropy(case: Case) -> Iterator[Found]:
    """Cross-entropy over a single class is always 0."""
    found = find_often(case, lambda t: t["form"] in ("nll", "log_softmax") and t["classes"] == 1)
    if found:
        note, _, times = found
        yield Found(
            int(note["step"]),
            evidence={"classes": 1, "losses": times},
            source=note["source"],
            hint="the model has one output: use binary_cross_entropy_with_logits, or give it one output per class",
        )


@rule(
    "L10",
    "maximising-loss",
    severity="warning",
    watches="the sign of the gradient that backward sends into each term of the loss, fused or written out",
    threshold="negative for every error, positive for every log-likelihood or Dice score of every loss, in 3 losses",
    silent="adversarial trainings keep a positive term; likelihoods weighted by rewards are not such terms",
    hint="change the sign of the loss",
    needs=("probe:loss", "scalar:loss"),
    explains=("N*", "O08", "V01", "V02", "V03", "M12", "D06"),
)
def maximising_loss(case: Case) -> Iterator[Found]:
    """The loss is made larger, not smaller."""
    every = [(note, term) for note, term in list_terms(case) if term.get("sign") and term.get("is_loss")]
    ways = case.noted("step-direction")
    if any(way["others"] for way in ways):
        return  # several optimizers, not all of torch's: who goes which way on which loss is not known
    every = _set_right(every, ways)
    signed = _find_turned(every)
    notes = {id(note) for note, _ in signed}
    if len(notes) < _SIGNED or not all(_goes_up(note, term) for note, term in signed) or _is_weighed(signed):
        return
    if _is_region(signed):
        return
    note, term = signed[0]
    turned = {} if len(signed) == len(every) else {"losses_before_that_went_down": len(every) - len(signed)}
    yield Found(
        int(note["step"]),
        evidence={"losses": len(notes), "terms_going_down": 0, "term": term["form"], **turned},
        source=note["source"],
        hint=f"keep the factors of the loss{said_at(note['source'])} above 0: one has changed its sign by this step; "
        "until then the loss was made smaller"
        if turned
        else _tell_sign(term, ways),
    )


def _set_right(
    signed: list[tuple[dict[str, Any], Term]], ways: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], Term]]:
    """Return the losses with the way that steps of the user's own were seen to go, where they are."""
    if not ways:
        return signed
    seen = {"trained": True, "maximize": sorted({bool(way["is_up"]) for way in ways})}
    notes = {id(note): {**note, **seen} for note, _ in signed}
    return [(notes[id(note)], term) for note, term in signed]


def _find_turned(signed: list[tuple[dict[str, Any], Term]]) -> list[tuple[dict[str, Any], Term]]:
    """Return the losses since the last one that went down, if they come from the very lines of those before.

    Another line is another phase, which may unlearn what the first has learned.
    """
    last = max((at for at, (note, term) in enumerate(signed) if not _goes_up(note, term)), default=-1)
    before, after = signed[: last + 1], signed[last + 1 :]
    if any(_goes_up(note, term) for note, term in before):
        return []  # now up, now down: a game
    is_known = {note["source"] for note, _ in after} <= {note["source"] for note, _ in before}
    return after if not before or is_known else []


def _goes_up(note: dict[str, Any], term: Term) -> bool:
    """Return whether training makes a term larger; an attack on the input trains no model."""
    return bool(note["trained"]) and note["maximize"] == [term["sign"] > 0]


def _is_weighed(signed: list[tuple[dict[str, Any], Term]]) -> bool:
    """Return whether a part is multiplied by what may be a reward or cost: a large number, or another each time."""
    scales = {term["scale"] for _, term in signed if term.get("is_written_out")}
    return len(scales) > 1 or any(abs(scale) > 1 for scale in scales)


def _is_region(signed: list[tuple[dict[str, Any], Term]]) -> bool:
    """Return whether the one mask that all outputs are compared with may be a region to stay away from."""
    masks = [term["mask"] for _, term in signed if term["form"] == "agreement"]
    return bool(masks) and all(mask == masks[0] for mask in masks)


def _tell_sign(term: Term, ways: list[dict[str, Any]]) -> str:
    if ways and ways[0]["is_up"]:
        step = f"the step of {ways[0]['optimizer']}" if ways[0]["optimizer"] else "the update by hand"
        return f"{step} adds the gradient to the weights: subtract it, as in p -= lr * p.grad"
    if term["sign"] > 0:
        return "the optimizer was made with maximize=True"
    if not term.get("is_written_out") or term["is_error"]:
        return (
            "the error enters the loss with a minus sign, so it is made larger: take the minus sign out, or put one "
            "before the whole loss where that is a likelihood"
        )
    if term["form"] == "agreement":
        return "the loss is the score of agreement itself (Dice, IoU), so it is made smaller: use 1 - score"
    return f"the loss is the likelihood itself ({term['form']}): put a minus sign before it"
