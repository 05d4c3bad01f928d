"""The fields of configurations that `shrink` changes, as data: which of them are sizes, and how small each becomes."""

from __future__ import annotations

from typing import Any

VOCAB = 96  # special tokens lie in the lower half, so that text can be drawn from the upper
HEAD_DIM = 16
HIDDEN = 64  # where it isn't the product of heads and their width
WINDOW, CHUNK, TOPK = 4, 5, 4
REACH = 8  # the length from which rotary embeddings change


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _limits(*groups: tuple[int, str]) -> dict[str, int]:
    return {name: limit for limit, names in groups for name in names.split()}


# Numbers of layers. The first that a class has is the length of its lists of layers.
LAYERS = _names(
    """
    num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers num_decoder_layers
    depth num_blocks
    """
)

# Numbers of query heads, each with the number of key heads, which may be smaller.
HEADS = {
    "num_attention_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
    "n_head": ("num_kv_heads",),
    "n_heads": ("kv_n_heads",),
    "num_heads": ("num_key_value_heads",),
    "attention_heads": (),
    "decoder_attention_heads": (),
    "encoder_attention_heads": (),
    "linear_num_value_heads": ("linear_num_key_heads",),
    "linear_num_heads": (),
}  # fmt: skip

# Widths of heads. Others keep their proportion to the first that a class has.
HEAD_DIMS = _names(
    """
    head_dim d_head d_kv attention_head_dim kv_channels swa_head_dim rotary_dim v_head_dim index_head_dim
    """
)

# Numbers and widths of a recurrence's heads.
STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("n_mamba_heads", "mamba_headdim"),
)

# Widths of latent attention, in proportion to the width of the rotary part.
LATENT_DIMS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")

# Counts of layers of a kind at the beginning, and at the end.
FIRST_LAYERS = (
    "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "loop_layer_index_start",
    "loop_layer_index_end", "n_input_layers",
)  # fmt: skip
LAST_LAYERS = ("num_kv_shared_layers", "n_output_layers")

# A kind of layer that shares its weights within the kind: two of them stay.
SHARED = "hybrid"

# Periods after which kinds of layers repeat, and the place of a kind in the period.
PERIODS = {
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "decoder_sparse_step": "",
    "global_attn_every_n_layers": "",
    "interleave_moe_layer_step": "",
    "layer_group_size": "",
    "moe_layer_interval": "",
    "no_rope_layer_interval": "",
    "sliding_window_pattern": "",
}

# The largest value of each field; smaller values stay. Fields that aren't here shrink by `WIDTHS`, or not at all.
LIMITS = _limits(
    (VOCAB, "decoder_vocab_size encoder_hash_byte_group_vocab vocab_size"),
    (128, "max_position_embeddings max_source_positions max_target_positions n_positions"),
    (WINDOW, "attention_window_size keep_window_size local_attention_window_len sliding_window sliding_window_size "
             "window_size"),
    (2 * WINDOW, "local_attention rel_extent"),
    (CHUNK, "attention_chunk_size"),
    (TOPK, "index_topk indexer_budget"),
    (3, "floor_scale log_scaling_n_floor"),
    (2, "index_block_size index_topk_blocks indexer_compress_ratio block_size index_kpool"),
    (1, "start_n_top end_n_top"),  # tokens, of which the shortest document of a trial has one
    (4, "chunk_size mamba_chunk_size"),
    # Experts
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_group num_expert_group"),
    (1, "topk_group"),
    # Widths of heads, and groups of heads, in recurrences
    (8, "linear_head_dim linear_key_head_dim"),
    (2, "n_groups mamba_n_groups mamba_ngroups"),
    (2, "num_codebooks"),  # rows of tokens, which a sweep of Kyutai gives as columns
    # Towers, which text doesn't enter
    (32, "base_channels upsample_groups"),
    (4, "num_filters"),
    (1, "depths"),
)  # fmt: skip

# Words in names of widths. A multiple of the hidden size stays one; others become at most twice the new hidden size.
WIDTHS = ("size", "dim", "rank", "width", "inner", "channels", "embd", "dff", "model", "dim_ff", "shape", "ssm")

ROWS: dict[str, dict[str, Any]] = {
    # It rounds the width of keys up to 64, but not in its cache.
    "xlstm": {"qk_dim_factor": 1.0},
    # Axial positions need the length of the row, and buckets have no small size.
    "reformer": {"axial_pos_embds": False, "num_buckets": 2, "hash_seed": 1, "attention_head_size": 16},
    # Its vocoder and its flow run over all samples of a sound.
    "vits": {
        "flow_size": 8, "spectrogram_bins": 8, "posterior_encoder_num_wavenet_layers": 1,
        "upsample_initial_channel": 16, "upsample_rates": [2], "upsample_kernel_sizes": [4],
        "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]],
    },
    # It has a cache for every use of a layer, and computes their number.
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    # It computes how many layers run again and again.
    "dory": {"n_recurrent_layers": None},
    # Layers that run again and again begin and end where blocks of this many layers do.
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1},
}  # fmt: skip
