"""Refuses packed rows in a call of PEFT's that puts virtual tokens before each row (prompt, prefix and p-tuning)."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.block_diagonal import document_starts
from tritonpack.patches.call_arguments import OFFSETS, TREE
from tritonpack.patches.parts import PreHook

TOLD = (*OFFSETS, "seq_idx", "decoder_seq_idx", TREE)


def may_have_virtual_tokens(module: nn.Module) -> bool:
    """Whether a module is a wrapper of PEFT's, whose active adapter may have virtual tokens."""
    return hasattr(type(module), "active_peft_config")


class VirtualTokens(PreHook):
    """The hook of a wrapper of PEFT's.

    PEFT passes offsets and document numbers on for the tokens without the virtual ones, and leaves position ids out.
    """

    with_kwargs = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        adapter = module.active_peft_config
        if not getattr(adapter, "is_prompt_learning", False):
            return
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        count, kind = getattr(adapter, "num_virtual_tokens", "several"), getattr(adapter, "peft_type", "PEFT's")

        def message(name: str) -> str:
            return (
                f"{name} marks several documents in a row, and {type(module).__name__} puts {count} virtual tokens "
                f"({getattr(kind, 'value', kind)}) before each row, not before each document. Give each document a row "
                "of its own: a padded batch, padded on the right, with an attention_mask of 0 and 1. Adapters without "
                "virtual tokens, such as LoRA, take packed rows."
            )

        for name in TOLD:
            if arguments.get(name) is not None:
                raise UnsupportedModelError(message(name))
        for side in ("", "decoder_"):
            mask, positions = arguments.get(f"{side}attention_mask"), arguments.get(f"{side}position_ids")
            if isinstance(mask, Tensor) and mask.ndim == 2:
                require((mask <= 1).all(), message(f"{side}attention_mask"))
            if isinstance(positions, Tensor):
                begins = document_starts(positions)[:, 1:]
                if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == begins.shape[1] + 1:
                    begins = begins & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
                require(~begins.any(), message(f"{side}position_ids"))
