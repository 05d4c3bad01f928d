"""Sequence parallelism of other libraries: a patched model refuses to run on rows that they have sharded.

They shard a batch before the model is called, so a patched model would take the part of one rank for the whole rows.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tritonpack.errors import UnsupportedModelError

# Where the functions are defined that replace an attention function of transformers, and torch's.
ULYSSES = "deepspeed.runtime.sequence_parallel"
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"
MASK_REMOVER = "accelerate.big_modeling"

WHOLE_BATCH = "There every rank passes the whole batch. Or call tritonpack.unpatch(model)."


def require_whole_rows() -> None:
    """Refuse a call of a patched model while another library shards rows over ranks.

    DeepSpeed's Ulysses replaces the attention function of one name, for the whole process. Under a name of tritonpack
    its function drops the mask. Under any other name it isn't called, and each rank would attend to its own tokens
    alone. So would it under torch's context parallelism, which replaces torch's attention function.

    Raises:
        UnsupportedModelError: the message names what was found and the remedy.
    """
    for name in ALL_ATTENTION_FUNCTIONS:
        if _is_from(ALL_ATTENTION_FUNCTIONS[name], ULYSSES):
            raise UnsupportedModelError(
                f"DeepSpeed's Ulysses (UlyssesSPAttentionHF, accelerate's sp_size) has replaced the attention {name!r} "
                "in this process. It shards rows without telling a patched model, and drops the mask that keeps "
                "documents apart. Leave out sp_size and the registration of Ulysses, and share batches with "
                "tritonpack.SequenceParallel(model, group, exchange='ulysses', layout='contiguous'), also under "
                f"DeepSpeed's ZeRO. {WHOLE_BATCH}"
            )
    if _is_from(nn.functional.scaled_dot_product_attention, CONTEXT_PARALLEL):
        raise UnsupportedModelError(
            "torch's context parallelism (context_parallel, accelerate's and Trainer's cp_size) has sharded this "
            "batch. Only torch's scaled_dot_product_attention without a mask then sees the keys of other ranks, and a "
            "patched model needs the mask that keeps documents apart. Leave out cp_size, and share batches with "
            f"tritonpack.SequenceParallel(model, group, exchange='ring', layout='zigzag'). {WHOLE_BATCH}"
        )


def require_masks_kept(module: nn.Module) -> None:
    """Refuse layers whose mask accelerate's context parallelism removes.

    Args:
        module: a model, or one of its layers.

    Raises:
        UnsupportedModelError: the message names the first of these layers and the remedy.
    """
    for layer in module.modules():
        if any(_is_from(hook, MASK_REMOVER) for hook in layer._forward_pre_hooks.values()):
            raise UnsupportedModelError(
                f"accelerate's context parallelism (cp_size) removes the mask of {type(layer).__name__}, which keeps "
                "documents apart. Build the model anew, prepare it without cp_size, and share batches with "
                f"tritonpack.SequenceParallel(model, group, exchange='ring', layout='zigzag'). {WHOLE_BATCH}"
            )


def _is_from(function: Any, home: str) -> bool:
    """Whether a function is written in Python, in a module or a package. torch.compile traces this."""
    return isinstance(function, FunctionType) and function.__module__.startswith(home)
