"""Guards: refuse calls whose results other libraries would make wrong, and name the remedy."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.intervals import document_starts
from tritonpack.patches.modules import modules_in
from tritonpack.patches.parse_inputs import OFFSETS, TREE
from tritonpack.patches.parts import InstanceForward

WHOLE_BATCH = "There every rank passes the whole batch. Or call tritonpack.unpatch(model)."

# Python modules whose functions shard rows or keys over ranks. Each rank of a patched model would see only its own
# tokens.
ULYSSES = "deepspeed.runtime.sequence_parallel"
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"

ULYSSES_SHARDS = (
    "DeepSpeed's Ulysses (UlyssesSPAttentionHF, accelerate's sp_size) has replaced the attention {!r} in this process. "
    "It shards rows before attention, and drops the mask that keeps documents apart. Leave out sp_size "
    "and the registration of Ulysses, and share batches with tritonpack.SequenceParallel(model, group, "
    f"exchange='ulysses', layout='contiguous'), also under DeepSpeed's ZeRO. {WHOLE_BATCH}"
)

CONTEXT_PARALLEL_SHARDS = (
    "torch's context parallelism (context_parallel, accelerate's and Trainer's cp_size) has sharded this batch. Only "
    "torch's scaled_dot_product_attention without a mask then sees the keys of other ranks, and a patched model needs "
    "the mask that keeps documents apart. Leave out cp_size, and share batches with "
    f"tritonpack.SequenceParallel(model, group, exchange='ring', layout='zigzag'). {WHOLE_BATCH}"
)


def refuse_other_attention(name: str) -> None:
    """Raise an error that names the function that replaced the attention function `name`."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None:  # such as in a process that unpickled a patched model
        raise UnsupportedModelError(
            f"the attention function {name!r} isn't registered in this process; call tritonpack.register() once "
            "before the model runs."
        )
    home = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    raise UnsupportedModelError(
        f"the attention function {name!r} was replaced by {home}, which may drop the mask that keeps documents "
        "apart. Remove that replacement, or call tritonpack.unpatch(model)."
    )


def require_masks_kept(module: nn.Module) -> None:
    """Refuse a model, or a layer, whose mask is removed by accelerate's context parallelism."""
    for layer in modules_in(module):
        hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, FunctionType)]
        if any(hook.__module__.startswith("accelerate.big_modeling") for hook in hooks):
            raise UnsupportedModelError(
                f"accelerate's context parallelism (cp_size) removes the mask of {type(layer).__name__}, which keeps "
                "documents apart. Build the model anew, prepare it without cp_size, and share batches with "
                f"tritonpack.SequenceParallel(model, group, exchange='ring', layout='zigzag'). {WHOLE_BATCH}"
            )


CONTINUOUS_BATCHING = (
    "continuous batching (generate_batch, init_continuous_batching) uses its own attention and masks, which a patched "
    "model doesn't support. Call tritonpack.unpatch(model) first, or use `with tritonpack.patch(model)` for "
    "training alone; model.generate() works while it is patched."
)


class VirtualTokens(InstanceForward):
    """The forward of a PEFT wrapper that puts virtual tokens before each row (prompt, prefix and p-tuning).

    PEFT passes offsets and document numbers on without counting the virtual tokens, and drops position ids.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        adapter, arguments = self.module.active_peft_config, self.bound(args, kwargs)
        if not getattr(adapter, "is_prompt_learning", False):
            return self.inner(*args, **kwargs)
        count, kind = getattr(adapter, "num_virtual_tokens", "several"), getattr(adapter, "peft_type", "PEFT's")
        message = (
            f"marks several documents in a row, and {self.name} puts {count} virtual tokens "
            f"({getattr(kind, 'value', kind)}) before each row, not before each document. Give each document a row "
            "of its own: a padded batch, padded on the right, with an attention_mask of 0 and 1. Adapters without "
            "virtual tokens, such as LoRA, take packed rows."
        )
        for name in (*OFFSETS, "seq_idx", "decoder_seq_idx", TREE):
            if arguments.get(name) is not None:
                raise UnsupportedModelError(f"{name} {message}")
        for side in ("", "decoder_"):
            mask, positions = arguments.get(f"{side}attention_mask"), arguments.get(f"{side}position_ids")
            mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
            if mask is not None:
                require((mask <= 1).all(), f"{side}attention_mask {message}")
            if isinstance(positions, Tensor):
                begins = document_starts(positions)[:, 1:]
                if mask is not None and mask.shape[1] == begins.shape[1] + 1:
                    begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
                require(~begins.any(), f"{side}position_ids {message}")
        return self.inner(*args, **kwargs)
