"""AttentionShape: the sizes of a model's attention that exchanges cost by, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tritonpack.checks import is_int

# Kinds in a configuration's `layer_types` that have no attention between tokens by keys.
_NO_KEYS = {"conv", "linear_attention", "mamba", "mlp", "moe", "recurrent"}
_HALF = 2  # bytes per number where a configuration doesn't tell: training in bfloat16


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model's attention.

    Attributes:
        layers: with attention.
        heads: of queries.
        kv_heads: of keys and values; divides `heads`.
        dim: of a head's queries and keys.
        dim_v: of a head's values.
        bytes_per_number: of queries, keys and values.
        alibi: whether scores depend on distances (ALiBi).
    """

    layers: int
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    bytes_per_number: int = _HALF
    alibi: bool = False

    @property
    def key_row(self) -> int:
        """The numbers of a row's key and value, of one key head."""
        return self.dim + self.dim_v

    @property
    def wide(self) -> int:
        """Bytes per number of gradients that are summed over ranks (`wire.wide`)."""
        return max(self.bytes_per_number, 4)

    @classmethod
    def from_config(cls, config: Any, bytes_per_number: int | None = None) -> AttentionShape:
        """From a transformers configuration (its text part, where it has several), or anything with its fields.

        Args:
            config: with num_hidden_layers, num_attention_heads, and head_dim or hidden_size; num_key_value_heads and
                v_head_dim where they differ from these; qk_nope_head_dim and qk_rope_head_dim (DeepSeek) before
                head_dim. Layers that `layer_types` gives no attention don't count.
            bytes_per_number: of queries, keys and values; None means those of the configuration's dtype, or 2.

        Raises:
            ValueError: a field that is missing, or isn't one positive integer for all layers.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        kind = type(config).__name__

        def size(*names: str, default: int | None = None) -> int:
            for name in names:
                value: Any = getattr(config, name, None)
                if is_int(value) and value > 0:
                    return value
                if value is not None:
                    raise ValueError(
                        f"{kind}.{name} must be a positive integer, the same for all layers, to predict what exchanges "
                        f"cost; got {value!r:.60}. Choose exchange and layout by name for such a model."
                    )
            if default is None:
                raise ValueError(
                    f"{kind} has no {' or '.join(names)}, which the costs of exchanges follow from; pass the model's "
                    "configuration, or choose exchange and layout by name."
                )
            return default

        heads = size("num_attention_heads", "n_head")
        one_key_head = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
        kv_heads = 1 if one_key_head else size("num_key_value_heads", "num_kv_heads", default=heads)
        if heads % kv_heads:
            raise ValueError(f"{kind} has {heads} query heads, which its {kv_heads} key heads must divide.")
        if getattr(config, "qk_nope_head_dim", None) is not None:  # here head_dim is that of the rotated part
            dim = size("qk_nope_head_dim") + size("qk_rope_head_dim")
        elif getattr(config, "head_dim", None) is not None:
            dim = size("head_dim")
        else:
            dim = size("hidden_size", "n_embd", "d_model") // heads
        kinds = getattr(config, "layer_types", None)
        layers = sum(one not in _NO_KEYS for one in kinds) if kinds else size("num_hidden_layers", "n_layer")
        return cls(
            layers,
            heads,
            kv_heads,
            dim,
            size("v_head_dim", default=dim),
            _bytes_of(config) if bytes_per_number is None else bytes_per_number,
            bool(getattr(config, "alibi", False)) or getattr(config, "model_type", None) in ("bloom", "mpt"),
        )


def _bytes_of(config: Any) -> int:
    """Of a number in the configuration's dtype, which may be given by name, or not at all."""
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _HALF
