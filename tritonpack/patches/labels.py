"""Labels of packed documents: a causal loss must not predict a document's first token from the document before it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack import notices
from tritonpack.patches.families import LABELS_ARE_TOKENS
from tritonpack.patches.packed_batch import PackedBatch

IGNORED = -100
KEY = "first-label"


def warn_of_first_labels(model: PreTrainedModel, arguments: Mapping[str, Any], packed_batch: PackedBatch) -> None:
    """Say once that the first label of a document isn't masked.

    Labels on an accelerator aren't looked at, because reading them would wait for it.

    Args:
        model: the module that computes the loss.
        arguments: of its call, by name.
        packed_batch: of the same call.
    """
    labels = arguments.get("labels")
    if torch.compiler.is_compiling() or notices.is_said(KEY) or not isinstance(labels, Tensor):
        return
    on_host = labels.device.type == packed_batch.where.type == "cpu"
    whole = (
        labels.shape == packed_batch.tokens
        and packed_batch.tells_documents
        and not packed_batch.cached
        and not packed_batch.shared
    )
    if not on_host or not whole or not shifts_labels(model, arguments):
        return
    first = packed_batch.runs()[0] & packed_batch.not_padding()
    unmasked = first[:, 1:] & (labels[:, 1:] != IGNORED)  # the first token of a row is predicted from nothing
    if bool(unmasked.any()):
        row, place = unmasked.nonzero()[0].tolist()
        notices.say_once(
            KEY,
            f"a document begins at token {place + 1} of row {row}, and its first label is "
            f"{int(labels[row, place + 1])}. {type(model).__name__} then learns to predict that token from the "
            f"document before. Set the first label of each document to {IGNORED}, as tritonpack.PackingCollator does.",
        )


def shifts_labels(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether a model holds each label against what it predicts at the token before, by transformers' causal loss, or
    because labels are its decoder's tokens."""
    if arguments.get("shift_labels") is not None:  # they take the place of labels
        return False
    if type(model).__name__ in LABELS_ARE_TOKENS:
        return True
    forward = inspect.unwrap(type(model).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "loss_function" in names and getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"
