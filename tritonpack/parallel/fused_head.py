"""TRL's fused head inside of SequenceParallel: it scores this rank's rows, and its numbers per token are gathered.

TRL puts a head into a model (`trl.trainer.utils.add_fused_lm_head`) that returns some numbers per token in place of
logits. It compares each token with the label of the next one, or with `shift_labels`. So each rank's head gets the
targets of its own rows. Every rank gets the few numbers per token of the whole batch, as the losses of SFTTrainer,
DPOTrainer and GRPOTrainer read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.shard_and_gather import Sharding

FUSED_HEAD = "fused_lm_head"  # the argument that asks for TRL's head


@dataclass(frozen=True, eq=False)
class FusedHead:
    """The loss of one call of a model with TRL's fused head.

    Attributes:
        sharding: how the batch is divided.
        targets: this rank's targets, (1, rows).
    """

    sharding: Sharding
    targets: Tensor

    def replace(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the head, in place of those that were `given` to the model."""
        return {"shift_labels": self.targets, "num_items_in_batch": None}

    def finish(self, output: Any, given: dict[str, Any]) -> Any:
        """The output of this rank's rows as the output of the whole batch, on every rank and differentiably."""
        names = [name for name, value in output.items() if value is not None and name != "loss"]
        for name in names:
            if not isinstance(output[name], Tensor) or output[name].shape != self.targets.shape:
                raise UnsupportedModelError(
                    f"the fused head returns {name}, which isn't one number per token, so ranks can't gather it. Leave "
                    "it out, or train without SequenceParallel."
                )
        dtypes = {name: output[name].dtype for name in names}
        wide = output["log_probs"].dtype
        whole = self.sharding.gather(torch.stack([output[name].to(wide) for name in names], -1))  # one collective
        if given.get("shift_labels") is None:  # else the last token of a row has a place in the output
            whole = whole[:, :-1]
        for name, values in zip(names, whole.unbind(-1), strict=True):
            output[name] = values.to(dtypes[name])
        items = given.get("num_items_in_batch")
        items = output["label_mask"].sum().clamp(min=1) if items is None else items
        output["loss"] = -output["log_probs"].sum() / items
        return output
