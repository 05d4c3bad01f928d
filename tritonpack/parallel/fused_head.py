"""TRL's fused head inside of SequenceParallel: it scores this rank's rows, and its numbers per token are gathered.

TRL puts a head into a model (`trl.trainer.utils.add_fused_lm_head`) that returns some numbers per token in place of
logits. It compares each token with the label of the next one, or with `shift_labels` as they are. So each rank's head
gets the targets of its own rows. The numbers per token are few, so every rank gets those of the whole batch, as the
losses of SFTTrainer, DPOTrainer and GRPOTrainer read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.shard_and_gather import Sharding

FUSED_HEAD = "fused_lm_head"  # the argument that asks for TRL's head
OWN_ARGUMENTS = (FUSED_HEAD, "shift_labels", "num_items_in_batch")


class FusedHead:
    """One call of a model with TRL's fused head.

    Attributes:
        sharding: how the batch is divided.
        shifted: whether the caller has shifted the labels, so that the last token of a row has a place in the output.
        items: what the sum over targets is divided by; None for their number.
    """

    def __init__(self, sharding: Sharding, arguments: dict[str, Any]) -> None:
        self.sharding = sharding
        self.shifted = arguments.get("shift_labels") is not None
        self.items = arguments.get("num_items_in_batch")

    def finish(self, output: Any) -> Any:
        """The output of this rank's rows as the output of the whole batch, on every rank and differentiably."""
        shape = (1, self.sharding.rows)
        names = [name for name, value in output.items() if value is not None and name != "loss"]
        for name in names:
            if not isinstance(output[name], Tensor) or output[name].shape != shape:
                raise UnsupportedModelError(
                    f"the fused head returns {name}, which isn't one number per token, so ranks can't gather it. Leave "
                    "it out, or train without SequenceParallel."
                )
        dtypes = {name: output[name].dtype for name in names}
        wide = output["log_probs"].dtype
        whole = self.sharding.gather(torch.stack([output[name].to(wide) for name in names], -1))  # one collective
        whole = whole if self.shifted else whole[:, :-1]
        for name, values in zip(names, whole.unbind(-1), strict=True):
            output[name] = values.to(dtypes[name])
        items = output["label_mask"].sum().clamp(min=1) if self.items is None else self.items
        output["loss"] = -output["log_probs"].sum() / items
        return output
