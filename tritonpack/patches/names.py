"""Tables of classes, arguments and outputs by name, for cases that shapes alone don't decide."""

from __future__ import annotations

import re

import torch
from torch import Tensor

# Classes whose results belong to a whole row: scores of it, a vector at its last special token, tokens up to its first
# separator.
ONE_DOCUMENT_A_ROW = re.compile(
    r"\w*(ForSequenceClassification|ForNextSentencePrediction|ForMultipleChoice|RewardModel)"
    r"|(CLIP|Tipsv2)Text(Model\w*|Transformer)|BigBirdForQuestionAnswering"
)

# Classes whose logits are one number for each token: ELECTRA's discriminator, and TAPAS, which chooses cells.
ONE_NUMBER_A_TOKEN = re.compile(r"\w*ForPreTraining|TapasForQuestionAnswering")

# Arguments that hold one target for each document.
TARGETS = ("labels", "next_sentence_label", "sentence_order_label", "question_lengths")

# Arguments and outputs of images and sounds. They have no value for each token of a row, whatever their shape.
OF_OTHERS = re.compile(
    r"(pixel|image|video|audio|visual|vision|speech|speaker|spectrogram|waveform|input_features|input_values|qformer"
    r"|flattened)\w*|lang_ids?|stop_labels"
)

# Arguments that match `OF_OTHERS` and do have a value for each token.
OF_TOKENS_AFTER_ALL = re.compile(r"\w*position_mask|image_mask|image_attention_mask|visual_pos_masks")

# Outputs with one value for each document, whatever their shape.
OF_DOCUMENTS = re.compile(
    r"logits|pool\w*_output|(text|sentence)_embeds|(seq_relationship|sop|cls|mc|relevance)_logits"
)


def is_of_tokens(name: str, value: Tensor, tokens: torch.Size) -> bool:
    """Whether an argument has a value for each of (B, T) tokens: (B, T, ...), (1, T, ...), or n positions (n, B, T)."""
    if OF_OTHERS.fullmatch(name) and not OF_TOKENS_AFTER_ALL.fullmatch(name):
        return False
    if name == "labels" and value.is_floating_point():  # scores
        return False
    shapes = (tokens, (1, tokens[1]))
    return value.shape[:2] in shapes or ("position_ids" in name and value.shape[1:] in shapes)
