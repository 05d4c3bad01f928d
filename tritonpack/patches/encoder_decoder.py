"""The forward of a model that holds an encoder and a decoder: documents are told apart on both sides."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.checks import require
from tritonpack.patches.base_forward import BaseForward
from tritonpack.patches.configurations import codebooks_of, pad_token_of
from tritonpack.patches.families import HEADS_SHIFT, MASKS_LABELS, SCORES_BEHIND_LAST_TOKEN, SHIFTS_INPUTS
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import OFFSETS, SOURCE, TARGET, cache_of, make_packed_batch, tokens_of
from tritonpack.patches.parts import PackingContext
from tritonpack.patches.pipeline import Pipeline
from tritonpack.patches.targets import IGNORED, PLACES, check_padding_labels, take_spans, warn_of_first_labels

LENGTHS = (*OFFSETS, "max_length_q", "max_length_k")


class EncoderDecoderForward(Pipeline):
    """The forward of a module that holds an encoder and a decoder. Each side gets a packing of its own.

    Such a module shifts labels, or the encoder's tokens, to the right to make the decoder's tokens. In a packed row the
    last token of a document would move into the next one, so each document is shifted by itself.
    """

    def __init__(self, module: PreTrainedModel, context: PackingContext, base: BaseForward) -> None:
        super().__init__(module, context, base)
        self.serving, self.books = base.serving, codebooks_of(module)
        self.known = self.known | {*SOURCE.values(), *TARGET.values(), *LENGTHS}

    def run(self, arguments: dict[str, Any]) -> Any:
        if any(isinstance(arguments.get(name), PackedBatch) for name in ("attention_mask", "decoder_attention_mask")):
            return self.inner(**arguments)  # the module around this one has read them
        told = {name: arguments.get(name) for names in (SOURCE, TARGET) for name in names.values()}
        _require_pairs(told["cu_seq_lens_q"], told["cu_seq_lens_k"])
        for name in (*LENGTHS, *told):
            if name not in self.names:
                arguments.pop(name, None)
        source, _ = tokens_of(arguments)
        target, _ = tokens_of(arguments, "decoder_")
        unshifted = self._unshifted(arguments) if target is None else None
        if unshifted is not None and unshifted is arguments.get("input_ids"):
            return self._run_shared(arguments, told)
        if source is None and arguments.get("encoder_outputs") is not None:
            source = arguments["encoder_outputs"][0]
        if source is not None:
            packed_batch = self._hand(arguments, "encoder", SOURCE, told, source)
            if packed_batch is not None and self.one_result:
                self.require_result_of_each(packed_batch)
        packed = [name for name in TARGET.values() if told[name] is not None]
        if target is None and packed:
            if unshifted is None:
                raise ValueError(f"{packed[0]} describes tokens of the decoder, and there are none; pass them.")
            target = unshifted
        packed_batch = None
        if target is not None:
            packed_batch = self._hand(arguments, "decoder", TARGET, told, target)
            if unshifted is not None and packed_batch is not None:
                shifted = arguments["decoder_input_ids"] = shift_documents(self.module, unshifted, packed_batch)
                if packed_batch.attention_mask is None and self.module.config.model_type in MASKS_LABELS:
                    real = (shifted != self.module.config.pad_token_id).int()
                    arguments["decoder_attention_mask"] = packed_batch.replace(attention_mask=real)
                warn_of_first_labels(self.module, {"labels": unshifted}, packed_batch)
            if packed_batch is not None:
                check_padding_labels(self.module, arguments, packed_batch)
        return self._run_own(arguments, packed_batch)

    def _run_shared(self, arguments: dict[str, Any], told: dict[str, Any]) -> Any:
        """Run a call whose decoder gets the encoder's tokens, shifted to the right: both have the same documents."""
        ids = arguments["input_ids"]
        for name in ("decoder_attention_mask", "decoder_position_ids", "decoder_seq_idx"):
            if told[name] is not None:
                raise ValueError(f"{name} was given without decoder_input_ids; pass both or neither.")
        if told["cu_seq_lens_q"] is None:
            told["cu_seq_lens_q"] = told["cu_seq_lens_k"]
        packed_batch = make_packed_batch(
            {**told, "input_ids": ids}, ids.shape, ids.device, self.serving, self.pad_token
        )
        if not packed_batch.tells_documents:
            return self.inner(**arguments)
        if self.one_result:
            self.require_result_of_each(packed_batch)
            if self.module.config.model_type in SCORES_BEHIND_LAST_TOKEN:
                self._require_no_padding_behind(packed_batch)
        arguments["attention_mask"] = arguments["decoder_attention_mask"] = packed_batch
        arguments["decoder_input_ids"] = shift_documents(self.module, ids, packed_batch)
        if "decoder_position_ids" in self.names:
            arguments["decoder_position_ids"] = arguments.get("position_ids")
        return self._run_own(arguments, packed_batch)

    def _run_own(self, arguments: dict[str, Any], packed_batch: PackedBatch | None) -> Any:
        """Run the module's own forward, with the losses of documents.

        Args:
            arguments: of the call.
            packed_batch: the packing of the tokens that have logits; None if no argument marks documents.
        """
        spans = None
        if packed_batch is not None:
            if self.mixed_loss and arguments.get("labels") is not None:
                self.require_no_mixed_loss(packed_batch)
            spans = take_spans(arguments, packed_batch, self) if not arguments.keys().isdisjoint(PLACES) else None
        output = self.inner(**arguments)
        return output if spans is None else spans.add_loss(output, self.name)

    def _require_no_padding_behind(self, packed_batch: PackedBatch) -> None:
        """Refuse rows that are padded on the right, whose scores would be read from padding."""
        full = packed_batch.not_padding()[:, -1].all()
        message = f"{self.name} scores a row behind its last token, where padding is not computed. Pad on the left."
        if torch.compiler.is_compiling():
            torch._assert_async(full, message)
        else:
            require(full, message)

    def _hand(
        self, arguments: dict[str, Any], side: str, names: dict[str, str], told: dict[str, Any], tokens: Tensor
    ) -> PackedBatch | None:
        """Put the packing of one side into the arguments, and return it.

        None if no argument marks documents of this side, or if generate() has made its mask already.
        """
        mask = told[names["attention_mask"]]
        made = mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2)
        if made or all(told[name] is None for name in names.values()):
            return None
        said = {name: told[here] for name, here in names.items()}
        ids = arguments.get("decoder_input_ids" if side == "decoder" else "input_ids")
        books = self.books if side == "decoder" else 1
        shape = torch.Size((tokens.shape[0] // books, tokens.shape[1]))
        if ids is not None and books > 1:
            books_of = ids.unflatten(
                0, (-1, books)
            )  # -1 where the codebooks of a token differ; padding is alike in all
            ids = torch.where((books_of == books_of[:, :1]).all(1), books_of[:, 0], -1)
        pad = pad_token_of(self.module.config, side)
        try:
            packed_batch = make_packed_batch({**said, "input_ids": ids}, shape, tokens.device, self.serving, pad)
        except ValueError as error:
            raise ValueError(f"documents of the {side}: {error}") from error
        cached = side == "decoder" and cache_of(arguments) is not None
        arguments[names["attention_mask"]] = packed_batch = packed_batch.replace(cached=cached)
        return packed_batch

    def _unshifted(self, arguments: dict[str, Any]) -> Tensor | None:
        """The tokens that the module will shift to the right to make the decoder's tokens."""
        labels = arguments.get("labels")
        if labels is not None and self.module.get_output_embeddings() is not None:
            return labels
        shifts = self.name.endswith(HEADS_SHIFT) or self.module.config.model_type in SHIFTS_INPUTS
        return arguments.get("input_ids") if shifts else None


def _require_pairs(cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    """Refuse offsets that list different documents on the two sides, for example one that is empty on one side."""
    if cu_q is None or cu_k is None or cu_q is cu_k:
        return
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seq_lens_q lists {cu_q.shape[0] - 1} documents of the decoder and cu_seq_lens_k {cu_k.shape[0] - 1} "
            "of the encoder; list as many of both."
        )
    require(
        ((cu_q[1:] == cu_q[:-1]) == (cu_k[1:] == cu_k[:-1]).to(cu_q.device)).all(),
        "a document is empty by cu_seq_lens_q and not by cu_seq_lens_k, or the other way round; leave out pairs with "
        "an empty document.",
    )


def shift_documents(module: Any, ids: Tensor, packed_batch: PackedBatch) -> Tensor:
    """Labels (B, T) moved to the right within each document: token ids for the decoder.

    The module's own function says what the first token is.
    """
    starts, _ = packed_batch.runs()
    rows, wraps = _shifted_rows(module, ids)
    if not wraps:
        return torch.where(starts, rows[:, :1], rows)
    # The last token of a document, its language, becomes the first one. Ignored labels don't count, as in the module.
    tokens = ids.masked_fill(ids == IGNORED, module.config.pad_token_id)
    real = tokens != module.config.pad_token_id
    document = starts.flatten().cumsum(0) - 1
    counts = torch.zeros_like(document).scatter_add(0, document, real.flatten().long())
    place = torch.arange(document.shape[0], device=ids.device)
    last = (place + counts[document] - 1).clamp(min=0, max=document.shape[0] - 1)  # right at the start of a document
    return torch.where(starts, tokens.flatten()[last].view(ids.shape), rows)


def _shifted_rows(module: Any, ids: Tensor) -> tuple[Tensor, bool]:
    """The rows as the module shifts them, and whether a row's last token becomes its first (else all begin alike)."""
    shift = getattr(sys.modules[type(module).__module__], "shift_tokens_right", None)
    wraps = shift is not None and len(inspect.signature(shift).parameters) == 2
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        if hasattr(module, name):
            return getattr(module, name)(ids), wraps
    assert shift is not None, type(module).__name__
    config = module.config
    more = (config.pad_token_id,) if wraps else (config.pad_token_id, config.decoder_start_token_id)
    return shift(ids, *more), wraps
