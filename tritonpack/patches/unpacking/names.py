"""Tables of classes, arguments and outputs by name, for cases that shapes alone don't decide."""

from __future__ import annotations

import re

# Classes whose results belong to a whole row: scores of it, a vector at its last special token, tokens up to its first
# separator.
ONE_DOCUMENT_A_ROW = re.compile(
    r"\w*(ForSequenceClassification|ForNextSentencePrediction|ForMultipleChoice|RewardModel)"
    r"|(CLIP|Tipsv2)Text(Model\w*|Transformer)|BigBirdForQuestionAnswering"
)

# Classes whose logits are one number for each token: ELECTRA's discriminator, and TAPAS, which chooses cells.
ONE_NUMBER_A_TOKEN = re.compile(r"\w*ForPreTraining|TapasForQuestionAnswering")

# Classes with features of texts that depend on their sound or their video.
CONDITIONED = re.compile(r"(Clvp|XCLIP)Model\w*")

# Classes whose states belong to their image, which may have as many patches as a document has tokens.
STATES_OF_IMAGES = re.compile(r"BlipForQuestionAnswering")

# Arguments that hold one target for each document.
TARGETS = ("labels", "next_sentence_label", "sentence_order_label", "question_lengths")

# Arguments, in `TARGETS` or not, whose losses aren't means over labels of tokens.
OTHER_TARGETS = re.compile(r"next_sentence_label|sentence_order_label|question_lengths|\w+_labels")

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

# Outputs (images, documents) of models that compare texts with images or sounds.
OF_DOCUMENTS_ACROSS = re.compile(r"logits_per_(image|video|audio)|logits_audio_text")

# Outputs of two dimensions that have one value for each token.
SCORES_OF_TOKENS = re.compile(r"(start|end)_logits|duration_outputs")


def mask_of(side: str) -> str:
    """The name of the mask of a side, "" or "decoder"."""
    return f"{side}_attention_mask" if side else "attention_mask"
