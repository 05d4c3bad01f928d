"""The loss of a sharded batch: targets are shifted, then sharded; sums are divided by the number of all targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.patches.forwards import package_of
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.targets import takes_targets

# Losses of transformers that compare each token with its own label. The others shift labels and take `shift_labels`.
PER_TOKEN = ("ForMaskedLMLoss", "ForTokenClassification")

FUSED_HEAD = "fused_lm_head"  # the argument that asks for TRL's head

REMEDY = (
    "Pass no labels, and compute the loss from the logits of the whole batch, which SequenceParallel(..., "
    "gather_outputs=True) returns."
)


def shifts(loss_function: Any) -> bool:
    """Return whether a model's loss function compares each token with the label of the next one.

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


def fuses_loss(model: PreTrainedModel) -> bool:
    """Return whether a model's forward is Liger-Kernel's, which computes the loss without loss function and logits.

    It takes `shift_labels` and `num_items_in_batch`. Code of tritonpack, and wrappers, may lie around it.
    """
    forward: Any = model.__dict__.get("forward", type(model).forward)
    while forward is not None:
        code = getattr(getattr(forward, "__func__", forward), "__code__", None)
        if code is not None and package_of(forward) == "liger_kernel":
            return "shift_labels" in code.co_varnames
        forward = forward.inner if isinstance(forward, InstanceForward) else getattr(forward, "__wrapped__", None)
    return False


@dataclass(eq=False)
class ShardedLoss:
    """The loss of one call, in place of the model's loss function. It also gives a fused loss its targets.

    Attributes:
        own: the model's loss function.
        fused: whether the model may compute its loss without its loss function.
        sharding: how the batch is divided.
        targets: this rank's targets, (1, rows).
        items: what the sum of losses is divided by, such as the number of all ranks' targets.
        result: the loss that it returned, without what the model adds to it; None until the model calls it.
    """

    own: Any
    fused: bool
    sharding: Sharding
    targets: Tensor
    items: Any
    result: Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of the loss, in place of the arguments of the call."""
        if not self.fused:
            return {"labels": self.targets}
        return {"labels": self.targets, "shift_labels": self.targets, "num_items_in_batch": self.items}

    def __call__(self, logits: Tensor, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
        # compared, because a graph that hashes a size fits only this size
        if not logits.shape[:-1] == labels.shape == self.targets.shape:
            raise UnsupportedModelError(
                f"the model passes logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} to "
                f"its loss, but there are {tuple(self.targets.shape)} targets. {REMEDY}"
            )
        kwargs["num_items_in_batch"] = self.items
        if getattr(self.own, "__name__", "") not in PER_TOKEN:
            kwargs["shift_labels"] = self.targets
        self.result = self.sharding.total(self.own(logits, self.targets, *args, **kwargs))
        return self.result.clone()  # models add the loss of routers in place

    def finish(self, model: PreTrainedModel, output: Any) -> None:
        """Set the loss of an output to the whole batch's, if the model has computed it without its loss function.

        Raises:
            UnsupportedModelError: it isn't known how the model computes its loss.
        """
        if self.result is not None:
            return
        if not self.fused or output.get("loss") is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes its loss without its loss function, from one rank's tokens. If a "
                "library has put a fused loss into the model, leave it out, or use Liger-Kernel's, applied before the "
                f"context is entered. For other losses: {REMEDY}"
            )
        if output.get("aux_loss") is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__} adds the loss of its routers to a fused loss, from one rank's tokens. Pass "
                "output_router_logits=False, or leave Liger-Kernel out."
            )
        output["loss"] = self.sharding.total(output["loss"])


@dataclass(frozen=True, eq=False)
class FusedHead:
    """The loss of one call of a model with TRL's fused head (`trl.trainer.utils.add_fused_lm_head`).

    The head returns numbers per token in place of logits, and compares tokens with `shift_labels`. So each rank's head
    gets the targets of its own rows. Every rank returns the numbers of the whole batch, which TRL's losses read.

    Attributes:
        sharding: how the batch is divided.
        targets: this rank's targets, (1, rows).
        given: the arguments of the call.
    """

    sharding: Sharding
    targets: Tensor
    given: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """The arguments of the head, in place of the arguments of the call."""
        return {"shift_labels": self.targets, "num_items_in_batch": None}

    def finish(self, output: Any) -> Any:
        """Make the output of the whole batch from this rank's rows, on every rank and differentiably."""
        for name, value in list(output.items()):
            if value is None or name == "loss":
                continue
            if not isinstance(value, Tensor) or value.shape != self.targets.shape:
                raise UnsupportedModelError(
                    f"the fused head returns {name}, which isn't one number per token, so ranks can't gather it. Leave "
                    "it out, or train without SequenceParallel."
                )
            whole = self.sharding.gather(value)
            # with shift_labels the last token of a row has a place in the output
            output[name] = whole[:, :-1] if self.given.get("shift_labels") is None else whole
        items = self.given.get("num_items_in_batch")
        items = output["label_mask"].sum().clamp(min=1) if items is None else items
        output["loss"] = -output["log_probs"].sum() / items
        return output
