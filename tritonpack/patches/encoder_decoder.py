"""The forward of an encoder-decoder model, and the mask of its cross-attention.

The n-th document of a row of the decoder belongs to the n-th document of the same row of the encoder. A query sees one
interval of the encoder's tokens, so cross-attention takes the same masks as self-attention (docs/math.md, section 1).
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.patches.configurations import pad_token_of
from tritonpack.patches.families import MASKS_LABELS, SHIFTING_HEADS, SHIFTS_INPUTS
from tritonpack.patches.mask_spec import WHOLE_DOCUMENT
from tritonpack.patches.packed_batch import IntervalMask, PackedBatch, Serving
from tritonpack.patches.parse_inputs import DECODER, ENCODER, LENGTHS, cache_of, make_packed_batch, tokens_of
from tritonpack.patches.parts import PackingContext
from tritonpack.patches.pipeline import Pipeline
from tritonpack.patches.targets import IGNORED, check_padding_labels, take_spans


class EncoderDecoderForward(Pipeline):
    """The forward of an encoder-decoder model. Each side gets its own packed batch.

    Such a model shifts labels, or the encoder's tokens, to the right to make the decoder's tokens. In a packed row the
    last token of a document would move into the next document, so each document is shifted by itself.
    """

    def __init__(self, module: PreTrainedModel, context: PackingContext, base: Any) -> None:
        super().__init__(module, context, base)
        self.serving = base.serving
        self.known = self.known | {*ENCODER.values(), *DECODER.values(), *LENGTHS}

    def run(self, arguments: dict[str, Any]) -> Any:
        if any(isinstance(arguments.get(name), PackedBatch) for name in ("attention_mask", "decoder_attention_mask")):
            return self.inner(**arguments)  # the model around this one has read them
        marks = {name: arguments.get(name) for names in (ENCODER, DECODER) for name in names.values()}
        _require_pairs(marks["cu_seq_lens_q"], marks["cu_seq_lens_k"])
        for name in (*LENGTHS, *marks):
            if name not in self.names:
                arguments.pop(name, None)
        (source, _), (target, _) = tokens_of(arguments), tokens_of(arguments, "decoder_")
        unshifted = self._unshifted(arguments) if target is None else None
        if unshifted is not None and unshifted is source:
            encoder = decoder = self._read_both(arguments, marks, source)
        else:
            if source is None and arguments.get("encoder_outputs") is not None:
                source = arguments["encoder_outputs"][0]
            target = unshifted if target is None else target
            if target is None and (names := [name for name in DECODER.values() if marks[name] is not None]):
                raise ValueError(f"{names[0]} was passed without tokens of the decoder; pass decoder_input_ids.")
            encoder = None if source is None else self._read(arguments, "encoder", ENCODER, marks, source)
            decoder = None if target is None else self._read(arguments, "decoder", DECODER, marks, target)
        if encoder is not None and self.one_result:
            self.require_result_of_each(encoder)
        if decoder is None:
            return self.inner(**arguments)
        if unshifted is not None:
            shifted = arguments["decoder_input_ids"] = shift_documents(self.module, unshifted, decoder)
            if decoder.attention_mask is None and self.module.config.model_type in MASKS_LABELS:
                real = (shifted != self.module.config.pad_token_id).int()
                arguments["decoder_attention_mask"] = decoder.replace(attention_mask=real)
        check_padding_labels(self.module, arguments, decoder)
        if self.mixed_loss and arguments.get("labels") is not None:
            self.require_no_mixed_loss(decoder)
        add_loss = take_spans(arguments, decoder, self)
        output = self.inner(**arguments)
        return output if add_loss is None else add_loss(output)

    def _read_both(self, arguments: dict[str, Any], marks: dict[str, Any], ids: Tensor) -> PackedBatch | None:
        """Read the documents of a call whose decoder gets the encoder's tokens, shifted to the right."""
        for name in ("decoder_attention_mask", "decoder_position_ids", "decoder_seq_idx"):
            if marks[name] is not None:
                raise ValueError(f"{name} was passed without decoder_input_ids; pass both or neither.")
        if marks["cu_seq_lens_q"] is None:
            marks["cu_seq_lens_q"] = marks["cu_seq_lens_k"]
        packed_batch = make_packed_batch(
            {**marks, "input_ids": ids}, ids.shape, ids.device, self.serving, self.pad_token
        )
        if not packed_batch.marks_documents:
            return None
        arguments["attention_mask"] = arguments["decoder_attention_mask"] = packed_batch
        if "decoder_position_ids" in self.names:
            arguments["decoder_position_ids"] = arguments.get("position_ids")
        return packed_batch

    def _read(
        self, arguments: dict[str, Any], side: str, names: dict[str, str], marks: dict[str, Any], tokens: Tensor
    ) -> PackedBatch | None:
        """Read the documents of one side, and replace its mask by them.

        None if no argument marks its documents, or if generate() has already made its mask.
        """
        own = {name: marks[here] for name, here in names.items()}
        mask = own["attention_mask"]
        made = mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2)
        if made or all(value is None for value in own.values()):
            return None
        own["input_ids"] = arguments.get("decoder_input_ids" if side == "decoder" else "input_ids")
        shape, pad = torch.Size(tokens.shape[:2]), pad_token_of(self.module.config, side)
        try:
            packed_batch = make_packed_batch(own, shape, tokens.device, self.serving, pad)
        except ValueError as error:
            message = str(error)
            for name, here in names.items():
                message = message.replace(name, here)
            raise ValueError(f"documents of the {side}: {message}") from error
        cached = side == "decoder" and cache_of(arguments) is not None
        arguments[names["attention_mask"]] = packed_batch = packed_batch.replace(cached=cached)
        return packed_batch

    def _unshifted(self, arguments: dict[str, Any]) -> Tensor | None:
        """Return the tokens that the module shifts to the right to make the decoder's tokens."""
        labels = arguments.get("labels")
        if labels is not None and self.module.get_output_embeddings() is not None:
            return labels
        shifts = self.name.endswith(SHIFTING_HEADS) or self.module.config.model_type in SHIFTS_INPUTS
        return arguments.get("input_ids") if shifts else None


def _require_pairs(cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    """Refuse offsets that list different documents on the two sides, such as a document that is empty on one side."""
    if cu_q is None or cu_k is None or cu_q is cu_k:
        return
    count, other = cu_q.shape[0] - 1, cu_k.shape[0] - 1
    if count != other:
        raise ValueError(
            f"cu_seq_lens_q lists {count} documents of the decoder and cu_seq_lens_k {other} of the encoder; both must "
            "list the same number."
        )
    require(
        ((cu_q.diff() == 0) == (cu_k.diff() == 0).to(cu_q.device)).all(),
        "a document is empty in only one of cu_seq_lens_q and cu_seq_lens_k; leave out pairs with an empty document.",
    )


def shift_documents(module: Any, ids: Tensor, packed_batch: PackedBatch) -> Tensor:
    """Shift labels (B, T) to the right within each document, and return the decoder's token ids.

    The first token is from the module's own function.
    """
    starts, _ = packed_batch.runs()
    shift = getattr(sys.modules[type(module).__module__], "shift_tokens_right", None)
    wraps = shift is not None and len(inspect.signature(shift).parameters) == 2  # a row's last token becomes its first
    methods = ("prepare_decoder_input_ids_from_labels", "_shift_right")
    if method := next((name for name in methods if hasattr(module, name)), None):
        rows = getattr(module, method)(ids)
    else:
        assert shift is not None, type(module).__name__
        config = module.config
        rows = shift(ids, config.pad_token_id, *(() if wraps else (config.decoder_start_token_id,)))
    if not wraps:
        return torch.where(starts, rows[:, :1], rows)
    # The last token of a document, its language, becomes the first. Ignored labels don't count, as in the module.
    tokens = ids.masked_fill(ids == IGNORED, module.config.pad_token_id)
    real = tokens != module.config.pad_token_id
    document = starts.flatten().cumsum(0) - 1
    counts = torch.zeros_like(document).scatter_add(0, document, real.flatten().long())
    place = torch.arange(document.shape[0], device=ids.device)
    last = (place + counts[document] - 1).clamp(min=0, max=document.shape[0] - 1)  # only used where a document starts
    return torch.where(starts, tokens.flatten()[last].view(ids.shape), rows)


def cross_attention_mask(
    arguments: dict[str, Any], packed_batch: PackedBatch | None, names: list[str], serving: Serving
) -> IntervalMask:
    """Make the mask of cross-attention from the arguments of a decoder's forward and the `names` that it takes.

    `encoder_attention_mask` may be a `PackedBatch`, or a mask (B, K) of integers, 0 for padding, that may number
    documents. `packed_batch`, of the decoder's tokens, is None if they continue a cache.
    """
    states, mask = arguments["encoder_hidden_states"], arguments.get("encoder_attention_mask")
    if isinstance(mask, IntervalMask):  # made by the module around this one
        return mask
    if "encoder_attention_mask" not in names:
        raise UnsupportedModelError(
            "this decoder takes encoder_hidden_states and no encoder_attention_mask, so its cross-attention would mix "
            "documents. Unpatch the model."
        )
    tokens = torch.Size(states.shape[:2])
    if not isinstance(mask, PackedBatch):
        if mask is not None and mask.ndim != 2:
            raise ValueError(
                f"encoder_attention_mask has shape {tuple(mask.shape)}; a patched model makes masks of more than two "
                "dimensions itself. Number documents in a mask of shape (batch, keys)."
            )
        mask = make_packed_batch({"attention_mask": mask}, tokens, states.device, serving)
    length = tokens_of(arguments)[1][1]
    shape = torch.Size((tokens[0], 1, length, tokens[1]))
    return IntervalMask(_cross_mask(packed_batch, mask, length), shape, serving, None, WHOLE_DOCUMENT)


def _cross_mask(decoder: PackedBatch | None, keys: PackedBatch, length: int) -> BlockDiagonalMask:
    """Make the mask of `length` queries per row of the decoder. Each sees the encoder's document of its own pair.

    If `decoder` is None, each row holds one document, whose beginning is in a cache.
    """
    queries = decoder
    if queries is None:
        tokens = torch.Size((keys.tokens[0], length))
        queries = PackedBatch(None, None, None, tokens, keys.device, keys.serving)
    counts, live, number = (x.to(keys.device) for x in _documents(queries))
    key_counts, key_live, key_number = _documents(keys)

    def message() -> str:
        row = int((counts != key_counts).nonzero()[0])
        here, there = int(counts[row]), int(key_counts[row])
        differ = f"row {row} has {here} documents in the decoder and {there} in the encoder"
        if decoder is not None:
            return (
                f"{differ}. Mark documents on both sides: the encoder's by a numbered attention_mask, cu_seq_lens_k, "
                "seq_idx or position_ids, the decoder's by a numbered decoder_attention_mask, cu_seq_lens_q, "
                "decoder_seq_idx or decoder_position_ids."
            )
        return (
            f"a row that continues a cache must have one document on the encoder's side; {differ}. Generate from one "
            "document in each row."
        )

    require((counts == key_counts).all(), message)
    columns = length + keys.tokens[1] + 1  # more than any document's number
    row = torch.arange(keys.tokens[0], device=keys.device)[:, None] * columns
    query_numbers, key_numbers = (row + number).flatten(), (row + key_number).flatten()
    begin = torch.searchsorted(key_numbers, query_numbers)
    end = torch.searchsorted(key_numbers, query_numbers, right=True)  # after the padding behind a document
    before = nn.functional.pad(key_live.flatten().cumsum(0), (1, 0))
    stop = begin + before[end] - before[begin]
    _require_same_numbers(queries, keys, begin, live)
    start = torch.where(live.flatten(), begin, stop)
    return BlockDiagonalMask(start.to(torch.int32), stop.to(torch.int32), keys.tokens.numel())


def _documents(packed_batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of documents of each row, (B,); True for tokens that aren't padding, (B, T); and the number of
    each token's document in its row, (B, T) int64 from 1. Padding has the number of the document before it."""
    live = packed_batch.not_padding()
    starts = packed_batch.runs()[0] & live
    return starts.sum(1), live, starts.cumsum(1)


def _require_same_numbers(queries: PackedBatch, keys: PackedBatch, begin: Tensor, live: Tensor) -> None:
    """Require that both documents of a pair have one number, if masks number the documents of both sides."""
    masks = queries.attention_mask, keys.attention_mask
    if masks[0] is None or masks[1] is None:
        return
    numbers, key_numbers = masks[0].to(keys.device), masks[1].flatten()
    partners = key_numbers[begin.clamp(max=key_numbers.shape[0] - 1)].view(numbers.shape)
    differ = (numbers != partners) & live & (numbers.max() > 1) & (key_numbers.max() > 1)
    require(
        ~differ.any(),
        lambda: (
            f"document {int(numbers[differ][0])} of the decoder's mask would see document {int(partners[differ][0])} "
            "of the encoder's. Give both documents of a pair the same number, and every document a partner."
        ),
    )
