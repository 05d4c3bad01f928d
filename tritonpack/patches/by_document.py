"""Packed rows run as a padded batch, one document a row: for models that give one result a row, or search a row for
special tokens."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.patches.current import HANDED
from tritonpack.patches.documents import Documents
from tritonpack.patches.tokens import text_config

# Classes whose results are of a whole row: scores of it, a vector at its last special token, tokens up to its first
# separator.
ONE_DOCUMENT_A_ROW = re.compile(
    r"\w*(ForSequenceClassification|ForNextSentencePrediction|ForMultipleChoice|RewardModel)"
    r"|(CLIP|Tipsv2)Text(Model\w*|Transformer)|BigBirdForQuestionAnswering"
)

# What such a call has of each document.
TARGETS = ("labels", "next_sentence_label", "sentence_order_label", "question_lengths")

# Outputs of a document, whatever their shape.
OF_DOCUMENTS = re.compile(
    r"logits|pool\w*_output|(text|sentence)_embeds|(seq_relationship|sop|cls|mc|relevance)_logits"
)

# What says how a row is packed, and means nothing for the rows of a padded batch.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def padded(
    documents: Documents, arguments: dict[str, Any], model: PreTrainedModel, questions: int | None = None
) -> dict[str, Any]:
    """The arguments of a call with packed rows, as those of a padded batch with one document a row.

    Args:
        documents: of the packed rows.
        arguments: by name; what has one value a token is cut into documents.
        model: the model that is called.
        questions: how many questions the documents answer, where a target is of a question.

    Raises:
        ValueError: there are no tokens to pad, no token to pad them with, or targets of anything but documents.
    """
    ids = arguments.get("input_ids")
    name = type(model).__name__
    if ids is None:
        raise ValueError(
            f"{name} gives one result a document and finds the end of each by its tokens; pass packed rows as "
            "input_ids instead of inputs_embeds."
        )
    pad = getattr(text_config(model.config), "pad_token_id", None)
    if pad is None:
        raise ValueError(
            f"{name} gives one result a document and tells documents from padding by config.pad_token_id, which is "
            "None. Set it to the tokenizer's."
        )
    one, count = ("document", len(documents)) if questions is None else ("question", questions)
    require_one_target_each(one, count, arguments, name)
    batch = {key: _cut(documents, value) for key, value in arguments.items() if key not in (*PACKING, HANDED)}
    batch["input_ids"] = documents.cut(ids, fill=pad)
    batch["attention_mask"] = documents.inside.long()
    return batch


def laid_back(documents: Documents, output: dict[str, Any]) -> None:
    """Put what an output has of every token (documents, longest, ...) into the packed rows (B, T, ...), in place."""
    for name, value in output.items():
        if not OF_DOCUMENTS.fullmatch(name):
            output[name] = _lay_back(documents, value)


def require_one_target_each(one: str, count: int, arguments: dict[str, Any], model: str) -> None:
    for name in TARGETS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.shape[:1] != (count,):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but the packed rows hold {count} {one}s, and {model} gives "
                f"one result a {one}, in order. Pass {name} of shape ({count},), or ({count}, ...) where a {one} has "
                "several."
            )


def _cut(documents: Documents, value: Any) -> Any:
    """An argument that has one value a token, or several kinds of positions, by document; others as they are."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    rows, length = documents.tokens
    if value.shape[:2] in ((rows, length), (1, length)):
        return documents.cut(value)
    if value.ndim == 3 and value.shape[1:] in ((rows, length), (1, length)):
        return torch.stack([documents.cut(one) for one in value])
    return value


def _lay_back(documents: Documents, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_lay_back(documents, one) for one in value)
    of_tokens = isinstance(value, Tensor) and value.shape[:2] == documents.inside.shape
    return documents.lay_back(value) if of_tokens else value
