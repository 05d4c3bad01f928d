"""What makes a tiny configuration of each model type: data only, read by `zoo.py`."""

from typing import Any

VOCAB = 64
WINDOW, CHUNK, TOPK = 4, 5, 4

# fmt: off
# One key per line would be nine hundred lines.

# Keys that a configuration class doesn't have are dropped.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # Other names for sizes
    "decoder_layers": 2, "encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "ffn_dim": 48, "dff": 48,
    "dim_ff": 48, "d_inner": 48, "n_inner": 48, "feed_forward_size": 48, "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48, "dim_head": 8, "rotary_dim": 4, "depth": 2, "num_heads": 4, "embedding_size": 16,
    "out_hidden_size": 32, "pronunciation_vocab_size": 64, "pronunciation_embed_dim": 8, "shape_vocab_size": 64,
    "shape_embed_dim": 8,
    # Mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "zero_expert_num": 1,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "num_shared_experts": 1, "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "shared_experts_intermediate_size": 24,
    "expert_ffn_hidden_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "router_aux_loss_coef": 1.0,
    # Values of another width than keys
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    # Reach
    "sliding_window": WINDOW, "attention_window_size": WINDOW, "local_attention": 2 * WINDOW,
    "attention_chunk_size": CHUNK, "index_topk": TOPK, "index_head_dim": 8,
    # So many heads that two keys hardly ever have equal scores (negative ones become 0); the place of a key decides a
    # tie.
    "index_n_heads": 16,
    # Recurrences and convolutions
    "mamba_d_state": 4, "mamba_n_heads": 4, "n_mamba_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16,
    "mamba_head_dim": 16, "mamba_expand": 2, "mamba_chunk_size": 4, "chunk_size": 4, "block_size": 4, "state_size": 4,
    "ssm_state_size": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "mamba_d_conv": 3, "conv_L_cache": 3,
    "linear_conv_kernel_dim": 3, "short_conv_kernel_size": 3, "conv_kernel": 3, "conv_kernel_size": 3,
    "conv1d_width": 3,
    # Towers that text never enters
    "image_size": 8, "patch_size": 4,
}

FULL, SLIDING, LINEAR, INDEXED = "full_attention", "sliding_attention", "linear_attention", "indexed_attention"

DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
)


def _rows(*groups: tuple[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One row for every name in a group; later groups add to what earlier ones gave."""
    rows: dict[str, dict[str, Any]] = {}
    for names, values in groups:
        for name in names.split():
            rows[name] = {**rows.get(name, {}), **values}
    return rows


# By model type, and also by the type of a part (`gemma3_text`, of `gemma3`).
CAUSAL = _rows(
    # One layer with a window, one without. Types that have a window and no kinds of layers have it everywhere.
    ("afmoe beam cohere2 cohere2_moe cohere_compass_text cwm dots1 exaone4 exaone_moe flint gemma2 gemma3_text "
     "gemma4_text gemma4_unified_text gpt_oss granite_swa granitemoe_swa kolibri1 laguna mellum mimo_v2_flash "
     "ministral modernbert-decoder olmo3 qwen2 qwen2_moe qwen3 smollm3 vaultgemma",
     {"layer_types": [SLIDING, FULL]}),
    ("qwen2 qwen2_moe qwen3 qwen3_moe smollm3", {"use_sliding_window": True}),
    ("qwen2 qwen2_moe qwen3", {"max_window_layers": 1}),
    ("gpt_neo", {"attention_types": [[["local", "global"], 1]], "window_size": WINDOW}),
    ("llama4_text", {"no_rope_layers": [1, 0], "floor_scale": 3}),  # a layer of chunks, one of all
    ("doge", {"sliding_window": None, "keep_window_size": TOPK}),
    # Caps that are low enough to change scores
    ("gemma2 gemma3_text vaultgemma", {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    ("gemma2 vaultgemma", {"attn_logit_softcapping": 2.0}),
    ("beam nanochat gemma3n_text gemma4_text gemma4_unified_text", {"final_logit_softcapping": 5.0}),
    # Latent keys and values: rotary widths read head_dim, and every head has a key of its own.
    ("axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4 "
     "kimi_linear longcat_flash minicpm3 sarvam_mla youtu",
     {"head_dim": 4, "num_key_value_heads": 4}),
    # A selection of keys
    ("axk2 deepseek_v32 glm_moe_dsa hy_v4", {"layer_types": [INDEXED, INDEXED]}),
    ("glm_moe_dsa hy_v4", {"indexer_types": ["full", "shared"]}),
    ("dots3_note_text",
     {"layer_types": [INDEXED, SLIDING], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
      "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8,
      "swa_v_head_dim": 6}),
    ("minimax_m3_vl_text",
     {"layer_types": ["minimax_m3_sparse", FULL], "index_block_size": 2, "index_topk_blocks": 2,
      "index_local_blocks": 1, "index_n_heads": 2}),
    ("deepseek_v4",
     {"layer_types": [SLIDING, "compressed_sparse_attention", "heavily_compressed_attention"], "num_hidden_layers": 3,
      "mlp_layer_types": ["hash_moe", "moe", "moe"], "num_key_value_heads": 1, "partial_rotary_factor": 0.5,
      "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}, "index_topk": 2,
      "hc_mult": 2, "o_groups": 2, "o_lora_rank": 8}),
    ("reformer",
     # Position ids of a length that its chunks don't divide fail in its own padding.
     {"is_decoder": True, "attn_layers": ["local", "lsh"], "attention_head_size": 8, "local_attn_chunk_length": 2,
      "lsh_attn_chunk_length": 2, "num_buckets": 2, "hash_seed": 1, "axial_pos_embds": False}),
    # Feed-forward layers of both kinds
    ("axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v32 dots3_note_text exaone_moe glm4_moe_lite glm_moe_dsa "
     "hy_v3 hy_v4 inkling_text kimi_linear laguna mellum mimo_v2_flash minimax_m3_vl_text",
     {"mlp_layer_types": ["dense", "sparse"]}),
    ("bailing_hybrid kimi_linear", {"num_local_experts": 4}),
    # A recurrence or a convolution, then attention
    ("bailing_hybrid granitemoehybrid kimi_linear minimax olmo_hybrid qwen3_5_text qwen3_5_moe_text qwen3_next",
     {"layer_types": [LINEAR, FULL]}),
    ("qwen4_exp_text",
     {"layer_types": [LINEAR, INDEXED], "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8,
      "indexer_budget": 4, "indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 4, "ple_layer_ids": [1],
      "ple_embed_dim": 8, "ple_conv_kernel_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
      "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2}),
    ("lfm2 lfm2_moe", {"layer_types": ["conv", FULL]}),
    ("lfm3", {"layer_types": ["conv", SLIDING, FULL], "num_hidden_layers": 3}),
    ("inkling_text inkling2_text inkling2_loop_text",
     {"layer_types": ["hybrid_sliding", "hybrid"], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
      "swa_head_dim": 8, "d_rel": 4, "rel_extent": 6, "log_scaling_n_floor": 3, "unpadded_vocab_size": VOCAB}),
    # Two layers of both kinds run twice, between two that run once and one that does.
    ("inkling2_loop_text",
     {"layer_types": ["hybrid_sliding", "hybrid"] * 2 + ["hybrid_sliding"], "num_hidden_layers": 5,
      "n_layers_per_attn_res_block": 2, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2,
      "loop_gate_rank": 8}),
    # Its scales are stored in units of the initializer's range. Random ones would be too large in the default units.
    ("dory",
     {"layer_types": [SLIDING, FULL] * 2, "num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2,
      "n_output_layers": 1, "initializer_range": 1.0, "ngpt_alpha_init": 0.2}),
    ("lara_mini", {"layer_types": [LINEAR, SLIDING, FULL], "num_hidden_layers": 3}),
    ("zaya", {"layer_types": ["hybrid_sliding", "hybrid"], "num_experts_per_tok": 1, "router_hidden_size": 8}),
    ("bamba", {"attn_layer_indices": [1]}),
    ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    ("falcon_h1", {"mamba_d_ssm": 64}),
    ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 2}),
    ("nemotron_h", {"layers_block_type": [LINEAR, "moe", FULL, "mlp"], "n_groups": 2}),
    ("recurrent_gemma", {"block_types": ("recurrent", "attention"), "logits_soft_cap": 5.0}),
    ("zamba zamba2", {"layers_block_type": [LINEAR, "hybrid", "hybrid"], "num_hidden_layers": 3}),
    ("zamba2",
     {"num_mem_blocks": 2, "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 4,
      "num_key_value_heads": 4}),
    ("xlstm", {"qk_dim_factor": 2.0, "v_dim_factor": 2.0}),
    # Per-layer embeddings and shared keys
    ("gemma3n_text gemma4_text", {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}),
    ("gemma4_text gemma4_unified_text", {"global_head_dim": 16}),
    ("gemma3n_text",
     {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2, "laurel_rank": 4,
      "altup_num_inputs": 2}),
    # Decoders of encoder families, and similar types
    (DECODERS, {"is_decoder": True}),
    ("xlm", {"causal": True}),
    ("big_bird bigbird_pegasus", {"attention_type": "original_full"}),
    ("xmod", {"default_language": "en_XX"}),
    ("cpmant",
     {"prompt_length": 2, "prompt_types": 8, "segment_types": 3, "position_bias_num_buckets": 8,
      "position_bias_max_distance": 16}),
    ("longcat_flash", {"num_layers": 1}),
    ("cohere_compass_text",
     {"rope_parameters": {
         SLIDING: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, FULL: None}}),
    ("dbrx",
     {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1.0},
      "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2}}),
    ("blt",
     # Its configuration has no field num_hidden_layers, but a cache for the whole model reads it.
     {"num_hidden_layers": 2, "local_attention_window_len": WINDOW, "encoder_hash_byte_group_size": [3],
      "encoder_hash_byte_group_vocab": 64, "patching_threshold": 3.0, "global_config": {"hidden_size": 64},
      "encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64}}),
    # Models with towers
    ("mllama_text_model", {"cross_attention_layers": []}),
    ("musicgen musicgen_melody", {"decoder": {"num_codebooks": 2}}),
    ("dots3_note",
     {"vision_config": {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 32, "adapter_out_dim": 32},
      "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8}}),
    ("got_ocr2", {"vision_config": {"mlp_dim": 48, "output_channels": 8}}),
    ("gemma4",
     {"vision_config": {"position_embedding_size": 8},
      "audio_config": {"output_proj_dims": 32, "subsampling_conv_channels": [4, 4]}}),
    ("gemma4_unified", {"vision_config": {"mm_embed_dim": 32}, "audio_config": {"audio_embed_dim": 32}}),
    ("phi4_multimodal",
     {"audio_config": {"num_blocks": 2, "ext_pw_out_channel": 8, "nemo_conv_channels": 8, "input_size": 8,
                       "depthwise_separable_out_channel": 8, "bias_max_distance": 8},
      "vision_config": {"crop_size": 8}}),
    # All of its layers share the keys of another model.
    ("gemma4_unified_assistant",
     {"backbone_hidden_size": 32,
      "text_config": {"num_kv_shared_layers": 4, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}}),
)

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{name}-encoder": {"model_type": name, "is_decoder": False} for name in DECODERS.split()},
    "xlm-encoder": {"model_type": "xlm", "causal": False},
    "doge-experts": {"model_type": "doge", "is_moe": True},
    "doge-sliding": {"model_type": "doge", "sliding_window": WINDOW, "keep_window_size": 128},
    "dory-last-loop": {"model_type": "dory", "recurrent_kv_cache_mode": "last_loop"},
    "falcon-alibi": {"model_type": "falcon", "alibi": True},
    "falcon-multi-head": {"model_type": "falcon", "multi_query": False, "parallel_attn": False},
    "falcon-new": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma-bidirectional": {"model_type": "gemma", "use_bidirectional_attention": True},
    "gemma3-bidirectional": {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 6},
    "gemma4-bidirectional": {"model_type": "gemma4_text", "use_bidirectional_attention": "all", "sliding_window": 6},
    "gemma4-experts": {"model_type": "gemma4_text", "enable_moe_block": True},
    "gemma4-keys-as-values": {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4-shared-keys": {
        "model_type": "gemma4_text", "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_bigcode-multi-head": {"model_type": "gpt_bigcode", "multi_query": False},
    "gpt_neo-local": {"model_type": "gpt_neo", "attention_types": [[["local"], 2]]},
    "granitemoehybrid-attention": {
        "model_type": "granitemoehybrid", "layer_types": [FULL, FULL], "position_embedding_type": "rope",
    },
    "hrm_text-causal": {"model_type": "hrm_text", "prefix_lm": False},
    "lfm2-attention": {"model_type": "lfm2", "layer_types": [FULL, FULL]},
    **{
        f"{name}-full": {"model_type": name, "sliding_window": None}
        for name in ("ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2")
    },
    **{
        f"{name}-full": {"model_type": name, "use_sliding_window": False, "layer_types": None}
        for name in ("qwen2", "qwen2_moe", "qwen3")
    },
    "opt-projected": {"model_type": "opt", "word_embed_proj_dim": 16},
    "xlnet-causal": {"model_type": "xlnet", "attn_type": "uni"},
}

# A constant or a cast in the model's own code fails in float64, or gives NaN.
FLOAT32_ONLY = frozenset({"inkling2_loop_text", "inkling2_text", "prophetnet", "xglm"})

# Its backward runs only in training mode, which takes only documents whose length is a multiple of its chunks.
FORWARD_ONLY = frozenset({"reformer"})

# Arguments with which a call has gradients: a state that is updated in place has none.
DIFFERENTIABLE: dict[str, dict[str, Any]] = {"rwkv": {"use_cache": False}, "xlstm": {"use_cache": False}}

UNBUILT: dict[str, str] = {
    "gemma4_assistant": "its configuration demands layers without inputs of their own that all share another model's "
    "keys, and in transformers 5.24 Gemma4TextModel fails to cut the missing inputs",
}

# Encoders with decoders that are packed exactly, and what their language models are given beside the row of their type.
PAIRS = _rows(
    ("bart bigbird_pegasus encoder-decoder blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp pegasus plbart "
     "seamless_m4t seamless_m4t_v2 t5 t5gemma t5gemma2 umt5",
     {}),
    ("nllb-moe",
     {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 2, "moe_token_dropout": 0.0}),
    ("switch_transformers",
     {"expert_capacity": 3, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
      "router_jitter_noise": 0.0}),
)
