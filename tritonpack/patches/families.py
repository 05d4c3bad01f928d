"""Tables of the special cases: model families, classes, arguments and outputs.

A row is added only with tests that need it.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor


def _names(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Model types with attention outside of transformers' interface: they get a dense mask, O(T^2) memory.
DENSE = _names("big_bird bloom git gpt_neo gpt_neox_japanese megatron-bert mpt mvp rembert roformer trocr xglm")

# Model types that needed a dense mask before these versions of transformers.
DENSE_BEFORE = {"codegen": (5, 24), "gptj": (5, 24)}

# Model types and classes that can't be packed exactly, and why.
REFUSED = {
    "blt": "its patches and its hashes of preceding bytes run across documents",
    "cpmant": "its attention makes masks and position buckets of its own from segments and spans",
    "deepseek_v4": "its compressor pools keys across documents",
    "diffusion_gemma": "its canvas attends through a cache to the keys of whole rows",
    "gemma4_assistant": "it drafts tokens from another model's cache",
    "gemma4_unified_assistant": "it drafts tokens from another model's cache",
    "mobilebert": "its embeddings are each made of three tokens of the row",
    "musicgen_decoder": "its rows of ids are codebooks of sounds, several for a row of tokens",
    "musicgen_melody_decoder": "its rows of ids are codebooks of sounds, several for a row of tokens",
    "nllb-moe": "its experts take a limited number of tokens of a batch, so documents of a row compete for them",
    "prophetnet": "its decoder makes masks and position buckets of its own for n-grams",
    "switch_transformers": "its experts take the first tokens of a row until they are full",
    "xlstm": "its recurrent blocks run over the whole row, in pieces of their own",
    "reformer": "its attention sorts the tokens of a row into buckets",
    "T5GemmaForSequenceClassification": "it scores a row by the decoder's state behind its last token",
    "T5Gemma2ForSequenceClassification": "it scores a row by the decoder's state behind its last token",
    "voxtral_realtime": "its encoder hears a row's sounds, as long as its tokens, as one",
}

# Model types whose position ids begin at padding_idx + 1, as in fairseq.
COUNT_FROM_PADDING = _names(
    "camembert data2vec-text esm ibert layoutlmv3 lilt luke markuplm mpnet roberta roberta-prelayernorm xlm-roberta "
    "xlm-roberta-xl xmod"
)

# Tables of absolute positions that count the tokens of a row, and ignore position ids: an embedding, which may shift
# positions by its `offset`, or a module with the table in `weights`.
POSITION_TABLES = _names(
    "BartLearnedPositionalEmbedding BigBirdPegasusLearnedPositionalEmbedding BlenderbotLearnedPositionalEmbedding "
    "BlenderbotSmallLearnedPositionalEmbedding Kosmos2_5TextSinusoidalPositionalEmbedding "
    "M2M100SinusoidalPositionalEmbedding SeamlessM4TSinusoidalPositionalEmbedding "
    "SeamlessM4Tv2SinusoidalPositionalEmbedding MBartLearnedPositionalEmbedding MarianSinusoidalPositionalEmbedding "
    "MusicgenSinusoidalPositionalEmbedding MusicgenMelodySinusoidalPositionalEmbedding MvpLearnedPositionalEmbedding "
    "PLBartLearnedPositionalEmbedding PegasusSinusoidalPositionalEmbedding RoFormerSinusoidalPositionalEmbedding "
    "TrOCRLearnedPositionalEmbedding TrOCRSinusoidalPositionalEmbedding"
)

# Layers that mix tokens along the row by recurrence or convolution; each document runs by itself.
MIXERS = _names(
    "BailingHybridDeltaAttention BambaMixer FalconH1Mixer FalconMambaMixer GraniteMoeHybridMambaLayer "
    "Inkling2DynamicShortConvolution Inkling2LoopDynamicShortConvolution Inkling2LoopShortConvolution "
    "Inkling2ShortConvolution InklingShortConvolution JambaMambaMixer KimiLinearDeltaAttention LaraMiniGatedDeltaNet "
    "Lfm2MoeShortConv Lfm2ShortConv Lfm3ShortConv Mamba2Mixer MambaMixer MiniMaxLightningAttention "
    "NemotronHMamba2Mixer OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet "
    "Qwen4ExpTextGatedDeltaNet Qwen4ExpTextPLELayer RecurrentGemmaRecurrentBlock RwkvFeedForward RwkvSelfAttention "
    "Zamba2MambaMixer ZambaMambaMixer ZayaCCAProjection"
)

# Model types that compute positions or ALiBi from the padding mask, which must be as wide as their keys.
PLACES_FROM_MASK = _names("biogpt bloom falcon mpt opt")

# Model types that treat padding tokens as padding if they get no mask.
MASKS_PADDING = _names("t5_gemma_module")

# Decoders with use_bidirectional_attention=True that see both directions without a mask, and one direction with a
# causal mask.
BOTH_WAYS = _names("gemma gemma2 gemma3")

# Models around these decoders whose token_type_ids mark the tokens that see both directions: 0 for image and prompt.
PROMPT_TYPES = _names("paligemma")

# Attention that makes its own mask: (last part of its Python module, class): the argument that gets our mask.
OWN_MASKS = {
    ("modeling_flaubert", "MultiHeadAttention"): "mask",
    ("modeling_openai", "Attention"): "attention_mask",
    ("modeling_xlm", "MultiHeadAttention"): "mask",
}

# Model types whose causal mask sdpa drops in a call without padding, in transformers before 5.24.
SDPA_DROPS_MASK = _names("doge")

# Attention among the states of one token, which needs no mask. It is called through transformers' interface.
WITHIN_TOKENS = _names(
    "Inkling2BlockAttentionResidual Inkling2LoopBlockAttentionResidual Inkling2LoopMessageAttentionResidual"
)

# Layers that mix documents in every call, and why.
REFUSED_LAYERS = {
    "DogeCDMoE": "its router mixes the tokens of a row",
    "MiniMaxM3VLIndexer": "it chooses keys in blocks that are counted from the beginning of the row",
}

# Layers that mix documents that share tokens, even if a proof finds no difference, and why.
REFUSED_IN_TREES = {"DogeAttention": "it keeps the best of a row's keys, of whichever document"}

# Model types whose recurrent layers read padding like tokens, so padding on the left changes the whole row.
READS_PADDING = _names("recurrent_gemma rwkv")

# Encoder-decoder models that turn ignored labels into padding of the decoder, without a mask for it.
MASKS_LABELS = _names("encoder-decoder")

# Encoder-decoder models that shift the encoder's tokens to the right if they get no tokens of the decoder.
SHIFTS_INPUTS = _names("bart bigbird_pegasus led mbart mvp plbart")

# Suffixes of classes that do the same in every model type.
SHIFTING_HEADS = ("ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")


# Classes with one result for each row: its scores, a vector at its last special token, or the tokens up to its first
# separator.
ONE_DOCUMENT_A_ROW = re.compile(
    r"\w*(ForSequenceClassification|ForNextSentencePrediction|ForMultipleChoice|RewardModel)"
    r"|(CLIP|Tipsv2)Text(Model\w*|Transformer)|BigBirdForQuestionAnswering"
)

# Classes whose logits are one number for each token: ELECTRA's discriminator, and TAPAS, which chooses cells.
ONE_LOGIT_A_TOKEN = re.compile(r"\w*ForPreTraining|TapasForQuestionAnswering")

# Arguments that hold one target for each document.
TARGETS = ("labels", "next_sentence_label", "sentence_order_label", "question_lengths")

# Arguments and outputs of images and sounds. They have no value for each token of a row, even if their shape fits.
MEDIA_NAMES = re.compile(
    r"(pixel|image|video|audio|visual|vision|speech|speaker|spectrogram|waveform|input_features|input_values|qformer"
    r"|flattened)\w*|lang_ids?|stop_labels"
)

# Arguments that match `MEDIA_NAMES` but have a value for each token.
TOKEN_MEDIA_NAMES = re.compile(r"\w*position_mask|image_mask|image_attention_mask|visual_pos_masks")

# Outputs with one value for each document, even if their shape fits tokens.
DOCUMENT_OUTPUTS = re.compile(
    r"logits|pool\w*_output|(text|sentence)_embeds|(seq_relationship|sop|cls|mc|relevance)_logits"
)


def is_of_tokens(name: str, value: Tensor, tokens: torch.Size) -> bool:
    """Return whether an argument has a value for each token: shape (B, T, ...), (1, T, ...), or n positions (n, B,
    T)."""
    if MEDIA_NAMES.fullmatch(name) and not TOKEN_MEDIA_NAMES.fullmatch(name):
        return False
    if name == "labels" and value.is_floating_point():  # scores
        return False
    shapes = (tokens, (1, tokens[1]))
    return value.shape[:2] in shapes or ("position_ids" in name and value.shape[1:] in shapes)
