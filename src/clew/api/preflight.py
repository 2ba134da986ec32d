"""The rehearsal before a long run, for a model and a batch of one's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from clew.model.preflight import Preflight
    from clew.replay.preflight_subject import Subject


def preflight(
    model: torch.nn.Module,
    batch: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    step: Callable[[], Any] | None = None,
    loader: Any = None,
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
) -> Preflight:
    """Rehearse a training on one batch, in copies of the process, and return what each check found.

    ``batch`` is a pair of inputs and targets, of which ``loss_fn(model(inputs), targets)`` makes the loss; without
    ``loss_fn`` the model is called with the batch and returns a loss, or something with ``.loss``. ``step`` may be
    given instead: a function that trains for one step. ``optimizer``: one or several, Adam unless given.
    ``loader`` lets labels and workers be looked at. ``only`` and ``skip`` choose checks by name.
    """
    import torch

    from clew.replay.preflight import rehearse

    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module, got a {type(model).__name__}",
            where="clew.preflight(model, batch)",
            next_step="give the model itself",
        )
    if batch is None and step is None:
        raise UsageError(
            "there is nothing to train on",
            where="clew.preflight(model, batch)",
            next_step="give a batch, or a function that trains for one step: step=…",
        )
    check_can_copy()
    names = choose_checks(only, skip)
    subject = _make_subject(model, batch, loss_fn=loss_fn, optimizer=optimizer, step=step, loader=loader)
    return rehearse(subject, names=names)


def check_can_copy() -> None:
    """Raise where the process cannot be copied."""
    import torch

    if not hasattr(os, "fork"):
        raise UsageError(
            "this system cannot copy a process, which the rehearsal needs", next_step="use Linux"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            "a process that uses a GPU cannot be copied, which the rehearsal needs",
            next_step="rehearse on the CPU: CUDA_VISIBLE_DEVICES= clew preflight …",
        )


def choose_checks(only: str | Iterable[str] = (), skip: str | Iterable[str] = ()) -> list[str]:
    """Return the names of the checks that are wanted; raises for a name that is none."""
    from clew.replay.preflight import CHECKS

    wanted, unwanted = _names(only), _names(skip)
    for name in (*wanted, *unwanted):
        if name not in CHECKS:
            raise UsageError(
                f"no check is called '{name}'",
                next_step=suggest(name, CHECKS) or f"known: {', '.join(CHECKS)}",
            )
    return [name for name in CHECKS if (not wanted or name in wanted) and name not in unwanted]


def _names(value: str | Iterable[str]) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value)
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _make_subject(
    model: torch.nn.Module, batch: Any, *, loss_fn: Any, optimizer: Any, step: Any, loader: Any
) -> Subject:
    import torch

    from clew.capture.torch.flight import RootCall
    from clew.capture.torch.randomness import RandomStates
    from clew.replay.preflight_losses import LossWatch
    from clew.replay.preflight_subject import Beginning, Subject

    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer else []
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = given or [torch.optim.Adam(trainable)]
    args, kwargs, targets = _split(batch, has_loss=loss_fn is not None)
    beginning = Beginning()
    beginning.keep([*model.parameters(), *model.buffers()])
    for each in optimizers:
        beginning.keep([p for group in each.param_groups for p in group["params"]], each)
    beginning.keep_modes([model])
    random = RandomStates()
    random.take()

    def train() -> None:
        for each in optimizers:
            each.zero_grad()
        output = model(*args, **kwargs)
        # Inside a rehearsed step the loss functions are seen by name; one that was given as such is not.
        loss = _loss_of(output) if loss_fn is None else LossWatch.seen(loss_fn)(output, *targets)
        loss.backward()
        for each in optimizers:
            each.step()

    return Subject(
        models=[model],
        optimizers=optimizers,
        step=step or train,
        roots=[] if batch is None else [RootCall(model, args, kwargs)],
        names={id(parameter): name for name, parameter in model.named_parameters()},
        beginning=beginning,
        random=random.restore,
        way="step" if step is not None else "model and loss",
        loader=loader,
        batches=[] if batch is None else [batch],
    )


def _split(batch: Any, *, has_loss: bool) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return what the model is called with, and the targets of the loss."""
    if has_loss:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UsageError(
                "with loss_fn, a batch is a pair of inputs and targets",
                where="clew.preflight(model, batch, loss_fn=…)",
                next_step="give (inputs, targets), or step= for another way to train",
            )
        inputs, targets = batch
        args, kwargs, _ = _split(inputs, has_loss=False)
        return args, kwargs, (targets,)
    if isinstance(batch, dict):
        return (), batch, ()
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}, ()


def _loss_of(output: Any) -> Any:
    import torch

    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, (tuple, list)) and loss:
        loss = loss[0]
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise UsageError("the model returns no loss", next_step="give loss_fn, or step= for another way to train")
