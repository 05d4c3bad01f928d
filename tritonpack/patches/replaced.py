"""Attention functions that another library, such as Ulysses, has replaced in transformers' registry."""

from __future__ import annotations

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.interface import FUNCTIONS

ULYSSES = "deepspeed.runtime.sequence_parallel"


def require_own_attention(name: str, before: str | None) -> None:
    """Refuse a call of a patched model whose attention another library has replaced.

    DeepSpeed's Ulysses spreads a row over ranks: it replaces the function of one name, or of all. Under tritonpack's
    name its function drops the mask. Under the name from before the patch it isn't called, and each rank would attend
    to its own tokens alone.

    Args:
        name: the name of the patched model's attention.
        before: the name that the attention had before the patch.

    Raises:
        UnsupportedModelError: the attention was replaced; the message names the function and the remedy.
    """
    for key in (name, before):
        function = ALL_ATTENTION_FUNCTIONS.get(key)
        home = getattr(function, "__module__", "")
        if home.startswith(ULYSSES):
            raise UnsupportedModelError(
                f"DeepSpeed's Ulysses (accelerate's sp_backend='deepspeed') has replaced the attention {key!r}. It "
                "shards rows without telling a patched model, and drops the mask that keeps documents apart. Share "
                "batches between ranks with tritonpack.SequenceParallel(model, group) instead, or call "
                "tritonpack.unpatch(model)."
            )
        if key == name and function is None:  # such as in a process that unpickled a patched model
            raise UnsupportedModelError(
                f"the attention function {key!r} isn't registered in this process; call tritonpack.register() once "
                "before the model runs."
            )
        if key == name and function is not FUNCTIONS[key]:
            raise UnsupportedModelError(
                f"the attention function {key!r} was replaced by {home}.{getattr(function, '__qualname__', function)}, "
                "which may drop the mask that keeps documents apart. Remove that replacement, or call "
                "tritonpack.unpatch(model)."
            )
