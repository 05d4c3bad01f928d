"""The forward of a model that holds an encoder and a decoder: documents are told apart on both sides."""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.checks import require
from tritonpack.patches.families import HEADS_SHIFT, MASKS_LABELS, SCORES_BEFORE_PADDING, SHIFTS_INPUTS
from tritonpack.patches.hooks import PackingHook
from tritonpack.patches.labels import warn_of_first_labels
from tritonpack.patches.model_forward import ModelForward
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.packing_context import UNCLAIMED, PackingContext
from tritonpack.patches.parse_inputs import make_packed_batch
from tritonpack.patches.strangers import kept_apart
from tritonpack.patches.tokens import common_to_codebooks, pad_token_of
from tritonpack.patches.unpacking.documents import Documents, require_one_document_a_row
from tritonpack.patches.unpacking.spans import take_spans

# What tells documents apart on each side, as `make_packed_batch` calls it and as the module around both sides does.
SOURCE = {
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "seq_idx": "seq_idx",
    "cu_seq_lens_q": "cu_seq_lens_k",
}
TARGET = {
    "attention_mask": "decoder_attention_mask",
    "position_ids": "decoder_position_ids",
    "seq_idx": "decoder_seq_idx",
    "cu_seq_lens_q": "cu_seq_lens_q",
}
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class BothSides(ModelForward):
    """The forward of a module that holds an encoder and a decoder: each side is handed a packing of its own.

    Where the module would shift labels, or the encoder's tokens, to the right to make the decoder's tokens, the last
    token of a document would move into the next one. So each document is shifted by itself.

    Attributes:
        replaced: the name of the attention that the module's config had before.
    """

    replaced: str | None = UNCLAIMED

    def __init__(self, module: PreTrainedModel, context: PackingContext, hook: PackingHook) -> None:
        super().__init__(module, context, hook)
        self.pads_left = module.config.model_type in SCORES_BEFORE_PADDING
        self.known = self.known | {*SOURCE.values(), *TARGET.values(), *OFFSETS}

    @property
    def serving(self) -> Serving:
        return self.hook.serving

    def attention_name(self, before: str | None) -> str:
        """What the attention is called from now on, in the place of the name from before."""
        return self.hook.attention_name(before)

    @property
    def takes_use_cache(self) -> bool:
        """T5Gemma's heads would hand it on beside one of their own."""
        return "use_cache" in self.names

    def run(self, arguments: dict[str, Any]) -> Any:
        if any(isinstance(arguments.get(name), PackedBatch) for name in ("attention_mask", "decoder_attention_mask")):
            return self.inner(**arguments)  # the module around this one has read them
        told = {name: arguments.get(name) for names in (SOURCE, TARGET) for name in names.values()}
        _require_pairs(told["cu_seq_lens_q"], told["cu_seq_lens_k"])
        for name in (*OFFSETS, *told):
            if name not in self.names:
                arguments.pop(name, None)
        target = _tokens(arguments, "decoder_input_ids", "decoder_inputs_embeds")
        unshifted = self._unshifted(arguments) if target is None else None
        ids = arguments.get("input_ids")
        if unshifted is not None and unshifted is ids:
            return self._run_shared(arguments, told)
        source = _tokens(arguments, "input_ids", "inputs_embeds", "encoder_outputs")
        if source is not None:
            packed_batch = self._hand(arguments, "encoder", SOURCE, told, source, ids)
            self._require_nothing_of_documents(packed_batch)
        packed = [name for name in TARGET.values() if told[name] is not None]
        if target is None and packed:
            if unshifted is None:
                raise ValueError(f"{packed[0]} describes tokens of the decoder, and there are none; pass them.")
            target = unshifted
        packed_batch = None
        if target is not None:
            packed_batch = self._hand(arguments, "decoder", TARGET, told, target, arguments.get("decoder_input_ids"))
            if unshifted is not None and packed_batch is not None:
                self._shift_labels(arguments, unshifted, packed_batch)
                warn_of_first_labels(self.module, {"labels": unshifted}, packed_batch)
        return self._find_spans(arguments, packed_batch)

    def _run_shared(self, arguments: dict[str, Any], told: dict[str, Any]) -> Any:
        """The decoder's tokens are the encoder's, shifted to the right: both have the same documents."""
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
        if self.one_result and (documents := self._documents(packed_batch)) is not None:
            self._require_tokens(arguments)
            sides = {"": documents}
            if self.pads_left:  # where the first token of the decoder isn't the first of the row
                sides["decoder"] = documents
                arguments["decoder_input_ids"] = shift_documents(self.module, ids, packed_batch)
            return self.run_by_document(sides, arguments)
        arguments["attention_mask"] = arguments["decoder_attention_mask"] = packed_batch
        arguments["decoder_input_ids"] = shift_documents(self.module, ids, packed_batch)
        if "decoder_position_ids" in self.names:
            arguments["decoder_position_ids"] = arguments.get("position_ids")
        return self._find_spans(arguments, packed_batch)

    @property
    def codebooks(self) -> int:
        """How many rows of the decoder's ids stand for one row of its tokens."""
        return max(hook.codebooks for hook in self.hook.patch.hooks)

    def _find_spans(self, arguments: dict[str, Any], packed_batch: PackedBatch | None) -> Any:
        """Run the module on its decoder's packing, with the loss of each document if it answers questions."""
        self.require_known_loss(arguments, packed_batch)
        spans = None if packed_batch is None else take_spans(arguments, packed_batch, self.module, self.own)
        sides = [arguments.get(name) for name in ("attention_mask", "decoder_attention_mask")]
        first = [side for side in sides if isinstance(side, PackedBatch) and self._is_first(side)]
        with ExitStack() as watches:
            for side in first:
                watches.enter_context(kept_apart(self.module, side))
            output = self.inner(**arguments)
        if first:
            self.seen = True
        return output if spans is None else spans.add_loss(output, self.name)

    def _documents(self, packed_batch: PackedBatch) -> Documents | None:
        return Documents.of(packed_batch, left=self.pads_left, always=self.pads_left)

    def _hand(
        self,
        arguments: dict[str, Any],
        side: str,
        names: dict[str, str],
        told: dict[str, Any],
        tokens: Tensor,
        ids: Tensor | None,
    ) -> PackedBatch | None:
        """Hand one side its packing, if it is told anything and its mask isn't made already, as generate() does."""
        mask = told[names["attention_mask"]]
        made = mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2)
        if made or all(told[name] is None for name in names.values()):
            return None
        said = {name: told[name_here] for name, name_here in names.items()}
        books = self.codebooks if side == "decoder" else 1
        shape = torch.Size((tokens.shape[0] // books, tokens.shape[1]))
        if ids is not None and books > 1:
            ids = common_to_codebooks(ids.unflatten(0, (-1, books)).movedim(1, -1))
        pad = pad_token_of(self.module.config, side)
        try:
            packed_batch = make_packed_batch({**said, "input_ids": ids}, shape, tokens.device, self.serving, pad)
        except ValueError as error:
            raise ValueError(f"documents of the {side}: {error}") from error
        cached = side == "decoder" and arguments.get("past_key_values") is not None
        packed_batch = packed_batch.replace(cached=cached)
        arguments[names["attention_mask"]] = packed_batch
        return packed_batch

    def _require_nothing_of_documents(self, packed_batch: PackedBatch | None) -> None:
        if self.one_result and packed_batch is not None:
            require_one_document_a_row(
                packed_batch,
                f"{self.name} gives one result a document; pass packed rows without decoder_input_ids, which it makes "
                "of each document's tokens, or give each document a row of its own.",
            )

    def _unshifted(self, arguments: dict[str, Any]) -> Tensor | None:
        """What the module will make the decoder's tokens of, by shifting them to the right."""
        labels = arguments.get("labels")
        if labels is not None and self.module.get_output_embeddings() is not None:
            return labels
        shifts = self.name.endswith(HEADS_SHIFT) or self.module.config.model_type in SHIFTS_INPUTS
        return arguments.get("input_ids") if shifts else None

    def _shift_labels(self, arguments: dict[str, Any], labels: Tensor, packed_batch: PackedBatch) -> None:
        shifted = arguments["decoder_input_ids"] = shift_documents(self.module, labels, packed_batch)
        if packed_batch.attention_mask is None and self.module.config.model_type in MASKS_LABELS:
            real = (shifted != self.module.config.pad_token_id).int()
            arguments["decoder_attention_mask"] = packed_batch.replace(attention_mask=real)


def _require_pairs(cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    """Offsets of both sides list the same documents: one that is empty on one side has no pair on the other."""
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


def _tokens(arguments: dict[str, Any], *names: str) -> Tensor | None:
    """The first of these arguments that is there, (B, T) or (B, T, n)."""
    for name in names:
        value = arguments.get(name)
        if name == "encoder_outputs" and value is not None:
            value = value[0]
        if value is not None:
            return value
    return None


def shift_documents(module: Any, ids: Tensor, packed_batch: PackedBatch) -> Tensor:
    """Labels moved to the right within each document, as the module moves those of a row.

    Args:
        module: whose labels they are; it has a rule of its own for the first token.
        ids: (B, T) labels, -100 for those that are ignored.
        packed_batch: of the tokens.

    Returns:
        (B, T) token ids for the decoder.
    """
    starts, _ = packed_batch.runs()
    rows, wraps = _shifted_rows(module, ids)
    if not wraps:
        return torch.where(starts, rows[:, :1], rows)
    # The last token of a document, its language, comes first; counted as the module does, without ignored labels.
    tokens = ids.masked_fill(ids == -100, module.config.pad_token_id)
    real = tokens != module.config.pad_token_id
    document = starts.flatten().cumsum(0) - 1
    counts = torch.zeros_like(document).scatter_add(0, document, real.flatten().long())
    place = torch.arange(document.shape[0], device=ids.device)
    last = (place + counts[document] - 1).clamp(min=0, max=document.shape[0] - 1)  # from the first token of a document
    return torch.where(starts, tokens.flatten()[last].view(ids.shape), rows)


def _shifted_rows(module: Any, ids: Tensor) -> tuple[Tensor, bool]:
    """Rows as the module shifts them, and whether their last token comes first (else the same one begins every row)."""
    shift = getattr(sys.modules[type(module).__module__], "shift_tokens_right", None)
    wraps = shift is not None and len(inspect.signature(shift).parameters) == 2
    for name in ("prepare_decoder_input_ids_from_labels", "_shift_right"):
        if hasattr(module, name):
            return getattr(module, name)(ids), wraps
    assert shift is not None, type(module).__name__
    config = module.config
    more = (config.pad_token_id,) if wraps else (config.pad_token_id, config.decoder_start_token_id)
    return shift(ids, *more), wraps
