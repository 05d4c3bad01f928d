"""What is special about model families, as data. A row is added here once the tests show what it says."""

from __future__ import annotations


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Model types (of the modules that are patched) that the tests show to be exact; others are tried on a few tokens first.
KNOWN = _names(
    """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1
    dots3_note_text electra emu3_text_model ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
    falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe kimi_linear kolibri1 laguna lfm2
    lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash
    minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder moshi
    moss_transcribe_diarize mpt musicgen_decoder musicgen_melody_decoder mvp nanochat nemotron nemotron_h olmo
    olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart qwen2
    qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma rembert
    roberta roberta-prelayernorm roc_bert roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr
    vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2 zaya
    """
)

# Model types whose attention doesn't go through transformers' interface: they get a dense mask, O(T^2) memory.
DENSE = _names(
    """
    big_bird bloom codegen git gpt_neo gpt_neox_japanese gptj megatron-bert mpt mvp rembert roformer trocr
    xglm
    """
)

# Model types that can't be packed exactly, and why.
REFUSED = {
    "blt": "its patches and its hashes of preceding bytes run across documents",
    "cpmant": "its attention makes masks and position buckets of its own from segments and spans",
    "deepseek_v4": "its compressor pools keys across documents",
    "gemma4_assistant": "it drafts tokens from another model's cache",
    "gemma4_unified_assistant": "it drafts tokens from another model's cache",
    "prophetnet": "its decoder makes masks and position buckets of its own for n-grams",
    "xlstm": "its recurrent blocks run over the whole row, in pieces of their own",
    "reformer": "its attention sorts the tokens of a row into buckets",
}

# Position ids of these begin at padding_idx + 1, as fairseq counts.
COUNT_FROM_PADDING = _names(
    """
    camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
    """
)

# Tables of absolute positions that count a row's tokens, whatever position ids the model is given.
POSITION_TABLES = _names(
    """
    BartLearnedPositionalEmbedding BigBirdPegasusLearnedPositionalEmbedding BlenderbotLearnedPositionalEmbedding
    BlenderbotSmallLearnedPositionalEmbedding MBartLearnedPositionalEmbedding
    MarianSinusoidalPositionalEmbedding MusicgenSinusoidalPositionalEmbedding
    MusicgenMelodySinusoidalPositionalEmbedding MvpLearnedPositionalEmbedding PLBartLearnedPositionalEmbedding
    PegasusSinusoidalPositionalEmbedding RoFormerSinusoidalPositionalEmbedding TrOCRLearnedPositionalEmbedding
    TrOCRSinusoidalPositionalEmbedding
    """
)

# Layers that mix along the row, by recurrence or convolution: each document runs by itself.
MIXERS = _names(
    """
    BailingHybridDeltaAttention BambaMixer FalconH1Mixer FalconMambaMixer GraniteMoeHybridMambaLayer
    Inkling2DynamicShortConvolution Inkling2ShortConvolution InklingShortConvolution JambaMambaMixer
    KimiLinearDeltaAttention Lfm2MoeShortConv Lfm2ShortConv Lfm3ShortConv Mamba2Mixer MambaMixer
    MiniMaxLightningAttention NemotronHMamba2Mixer OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet
    Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet Qwen4ExpTextPLELayer
    RecurrentGemmaRecurrentBlock RwkvFeedForward RwkvSelfAttention Zamba2MambaMixer ZambaMambaMixer
    ZayaCCAProjection xLSTMLayer
    """
)

# Model types that make ALiBi from the mask for padding, so that it must be as wide as their keys.
ALIBI_FROM_MASK = _names("bloom falcon mpt")

# Decoders whose rows of input_ids are codebooks, `num_codebooks` to a row of tokens.
CODEBOOKS = _names("musicgen_decoder musicgen_melody_decoder")

# Attention that makes its own mask: the class (with the end of its module's name) and the argument that takes ours.
OWN_MASKS = {
    ("modeling_openai", "Attention"): "attention_mask",
    ("modeling_xlm", "MultiHeadAttention"): "mask",
}

# Layers that can't be told where documents begin, and why.
REFUSED_LAYERS = {
    "DogeCDMoE": "its router mixes the tokens of a row",
    "MiniMaxM3VLIndexer": "it chooses keys in blocks that are counted from the beginning of the row",
}
