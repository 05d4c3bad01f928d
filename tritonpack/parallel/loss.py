"""The loss of a sharded batch: targets are shifted, then sharded; sums are divided by the number of all targets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.patches.labels import IGNORED, takes_targets
from tritonpack.patches.tiled_loss import TiledTargets

# Losses of transformers that compare each token with its own label. The others shift labels and take `shift_labels`.
PER_TOKEN = ("ForMaskedLMLoss", "ForTokenClassification")

FUSED = (
    "A fused loss, as Liger-Kernel and TRL's SFTTrainer put into a model, reads labels past it: leave it out and use "
    "tritonpack.patch(model, tiled_loss=True), which doesn't make the logits of a whole batch either. For other losses:"
)
REMEDY = "Pass no labels and compute the loss from gathered logits: SequenceParallel(..., gather_outputs=True)."


def shift(labels: Tensor, ignored: int) -> Tensor:
    """The target of each token of (B, T) labels: the label of the next token in its row, `ignored` for the last."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=ignored)


def shifts(loss_function: Any) -> bool:
    """Whether a model's loss function compares each token with the label of the next one.

    Raises:
        UnsupportedModelError: it doesn't take shifted targets, or not their number.
    """
    name = getattr(loss_function, "__name__", "")
    if name in PER_TOKEN:
        return False
    if not takes_targets(loss_function):
        raise UnsupportedModelError(
            f"the model's loss function {name or loss_function!r} must take shift_labels and num_items_in_batch, as "
            f"ForCausalLMLoss of transformers does, to compute the loss of one rank's tokens. {REMEDY}"
        )
    return True


class ShardedLoss:
    """Replaces a model's loss function during a forward pass. It returns the loss of the whole batch on all ranks.

    Attributes:
        own: the model's loss function.
        sharding: how the batch is divided.
        targets: this rank's targets, (1, rows) or (1, kept rows).
        whole: the targets of all ranks, of any shape.
        used: whether the model has called it.
        result: the loss that it returned, without what the model adds to it.
    """

    def __init__(self, own: Any, sharding: Sharding, targets: Tensor, whole: Tensor) -> None:
        self.own, self.sharding, self.targets, self.whole = own, sharding, targets, whole
        self.used = False
        self.result: Tensor | None = None

    def __call__(self, logits: Tensor, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
        tiled = isinstance(labels, TiledTargets)  # it stands for this rank's targets; logits are of one token
        shapes = {logits.shape[:-1], labels.shape, self.targets.shape}
        if not tiled and len(shapes) > 1:
            raise UnsupportedModelError(
                f"the model passes logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} to "
                f"its loss, but there are {tuple(self.targets.shape)} targets. {REMEDY}"
            )
        self.used = True
        items = kwargs.pop("num_items_in_batch", None)
        if items is None:
            items = (self.whole != kwargs.get("ignore_index", IGNORED)).sum()
        targets = labels if tiled else self.targets
        if shifts(self.own):
            kwargs["shift_labels"] = targets
        self.result = self.sharding.total(self.own(logits, targets, *args, num_items_in_batch=items, **kwargs))
        return self.result.clone()  # models add the loss of routers in place


@contextmanager
def computing_loss(model: Any, loss: ShardedLoss) -> Iterator[None]:
    """Set a model's loss function to `loss` for one forward pass.

    Raises:
        UnsupportedModelError: on leaving, if the model didn't call it.
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
            f"{type(model).__name__} computes its loss without its loss function, from one rank's tokens. {FUSED} "
            f"{REMEDY}"
        )
