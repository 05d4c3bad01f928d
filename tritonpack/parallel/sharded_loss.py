"""A model's loss over one rank's tokens: targets shifted before they were sharded, sums divided by the count of all."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.sharding import Sharding

IGNORED = -100  # transformers' label for tokens without a target, unless a call says otherwise by `ignore_index`

# Losses of transformers that compare every token with its own label; the others shift, and take `shift_labels`.
PER_TOKEN = ("ForMaskedLMLoss", "ForTokenClassification")

REMEDY = "Pass no labels and compute the loss from gathered logits: SequenceParallel(..., gather_outputs=True)."


def shift(labels: Tensor, ignored: int) -> Tensor:
    """The target of each token of (B, T) labels: the label of the next token of its row, `ignored` for the last."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)


def shifts(loss_function: Any) -> bool:
    """Whether a loss function of a model compares tokens with the next ones' labels.

    Raises:
        UnsupportedModelError: one that can't be told what the targets are, or how many there are.
    """
    if getattr(loss_function, "__name__", "") in PER_TOKEN:
        return False
    parameters = inspect.signature(loss_function).parameters
    if not {"shift_labels", "num_items_in_batch"} <= set(parameters):
        raise UnsupportedModelError(
            f"the model's loss function {getattr(loss_function, '__name__', loss_function)!r} must take shift_labels "
            f"and num_items_in_batch, as ForCausalLMLoss of transformers does, to see one rank's tokens alone. {REMEDY}"
        )
    return True


class ShardedLoss:
    """Stands for a model's loss function during a forward pass: equal on all ranks to that of the whole batch.

    Attributes:
        own: the model's loss function.
        sharding: who has which tokens.
        targets: (1, rows) or (1, kept), this rank's.
        whole: the targets of all ranks, in any shape.
        used: whether the model has asked for its loss.
    """

    def __init__(self, own: Any, sharding: Sharding, targets: Tensor, whole: Tensor) -> None:
        self.own, self.sharding, self.targets, self.whole = own, sharding, targets, whole
        self.used = False

    def __call__(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if logits.shape[:-1] != self.targets.shape or labels.shape != self.targets.shape:
            raise UnsupportedModelError(
                f"the model passes logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} to "
                f"its loss where there are {tuple(self.targets.shape)} targets: it changes them by itself. {REMEDY}"
            )
        self.used = True
        items = kwargs.pop("num_items_in_batch", None)
        if items is None:
            items = (self.whole != kwargs.get("ignore_index", IGNORED)).sum()
        if shifts(self.own):
            kwargs["shift_labels"] = self.targets
        part = self.own(logits, self.targets, *args, num_items_in_batch=items, **kwargs)
        return self.sharding.total(part)


@contextmanager
def computing_loss(model: Any, loss: ShardedLoss) -> Iterator[None]:
    """Have a model compute its loss by `loss`.

    Raises:
        UnsupportedModelError: on leaving, if it computed one by itself.
    """
    before = model.__dict__.get("_loss_function")
    model.loss_function = loss
    try:
        yield
    finally:
        del model.__dict__["_loss_function"]
        if before is not None:
            model.__dict__["_loss_function"] = before
    if not loss.used:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its loss without its loss function, of one rank's tokens. {REMEDY}"
        )
