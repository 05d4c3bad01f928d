"""Models that can't keep several documents in a row apart: each document gets a row of its own.

The model runs with its own attention, on the documents of packed rows laid out as a padded batch. Outputs with a value
for each token are laid back into the packed rows. If padding changes what a model computes, documents of one length run
at a time, without padding. This is exact, and no faster than a batch of documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritonpack import notices
from tritonpack.patches.call_arguments import PACKING, SOURCE, TARGET, cache_of, tokens_of
from tritonpack.patches.families import HEADS_SHIFT, LABELS_ARE_TOKENS, MIXES_ROWS
from tritonpack.patches.foreign_parallelism import require_masks_kept, require_whole_rows
from tritonpack.patches.labels import check_padding_labels
from tritonpack.patches.near_misses import refuse_near_misses
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.parse_inputs import make_packed_batch
from tritonpack.patches.tokens import codebooks_of, common_to_codebooks, pad_token_of
from tritonpack.patches.unpacking.choices import Choices, compares_choices
from tritonpack.patches.unpacking.document_places import Documents, require_one_document_a_row
from tritonpack.patches.unpacking.names import mask_of
from tritonpack.patches.unpacking.unpacking_forward import UnpackingForward

UNUSED = Serving("dense", "auto")  # no layer asks for a mask

# The arguments that a model with one kind of tokens reads documents from.
ONE_SIDE = {name: name for name in TARGET}

# All arguments that are read here, whatever the model takes.
READ = frozenset((*ONE_SIDE, *SOURCE.values(), *TARGET.values(), *PACKING))


class AlwaysUnpacked(UnpackingForward):
    """The forward of a model that always runs with one document in each row.

    Attributes:
        books: how many rows of the decoder's ids stand for one row of its tokens.
    """

    def __init__(self, module: PreTrainedModel, context: PackingContext, by_length: bool) -> None:
        super().__init__(module, context)
        # A head that makes a vector of a row's last token, or of all its tokens, reads padding, too.
        self.by_length = by_length or not self.summaries.isdisjoint({"last", "cls_index", "mean"})
        self.each = by_length and needs_calls_alone(module)
        self.books = codebooks_of(module) if self.decodes else 1
        self.known = frozenset((*self.names, *ONE_SIDE, *(TARGET.values() if self.decodes else ()), *PACKING))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        if self.context.state.running:  # inside of a model that runs with one document in each row
            return self.inner(**arguments)
        require_whole_rows()
        require_masks_kept(self.module)
        refuse_near_misses(arguments, self.known, self.name)
        return self.with_names(arguments)

    def run(self, arguments: dict[str, Any]) -> Any:
        ids = arguments.get("decoder_input_ids")
        if self.books > 1 and isinstance(ids, Tensor):  # a row for each row of tokens: (B, T, books)
            arguments = {**arguments, "decoder_input_ids": ids.unflatten(0, (-1, self.books)).movedim(1, -1)}
        output = self._run_packed(arguments)
        if self.books > 1 and isinstance(output.get("logits"), Tensor):  # (B, books, T, vocabulary)
            output["logits"] = output["logits"].flatten(0, 1)
        return output

    def _run_packed(self, arguments: dict[str, Any]) -> Any:
        choices = Choices.of(arguments, self.module, UNUSED, left=False)
        if choices is not None:
            return self.run_choices(choices, arguments)
        if compares_choices(self.module):  # each choice holds one document
            return self.run_rows(arguments)
        if self.name in LABELS_ARE_TOKENS and arguments.get("decoder_input_ids") is None:
            arguments = {**arguments, "decoder_input_ids": arguments.get("labels")}
        cached = cache_of(arguments) is not None
        packed_batches = self._read(arguments, cached)
        taken = {name: x for name, x in arguments.items() if name not in READ or self.takes(name)}
        if cached or not any(packed_batch.tells_documents for packed_batch in packed_batches.values()):
            return self.run_rows(taken)
        for packed_batch in packed_batches.values():
            check_padding_labels(self.module, arguments, packed_batch)
        laid_out = {side: Documents.of(packed_batch, always=True) for side, packed_batch in packed_batches.items()}
        documents = {side: found for side, found in laid_out.items() if found is not None}
        packed = any(found.packed for found in documents.values())
        if not documents or (not packed and arguments.get("use_cache")):
            padding = {mask_of(side): one.not_padding().long() for side, one in packed_batches.items()}
            return self.run_rows({**taken, **{mask: x for mask, x in padding.items() if self.takes(mask)}})
        self._require_no_states(arguments)
        for packed_batch in packed_batches.values():
            self.require_known_loss(arguments, packed_batch)
        if packed and not torch.compiler.is_compiling():
            self._warn()
        return self.with_loss(lambda: self.run_by_document(documents, arguments), arguments, packed_batches.get(""))

    def _warn(self) -> None:
        how = self.calls if self.by_length else "a padded batch"
        warn_of_rows(self.name, how)

    def run_rows(self, arguments: dict[str, Any]) -> Any:
        ids = arguments.get("decoder_input_ids")
        if self.books > 1 and isinstance(ids, Tensor):
            arguments = {**arguments, "decoder_input_ids": ids.movedim(-1, 1).flatten(0, 1)}
        with self.context.holding(running=True, packed_batch=None):
            output = self.inner(**arguments)
        if self.books > 1 and isinstance(output.get("logits"), Tensor):
            output["logits"] = output["logits"].unflatten(0, (-1, self.books))
        return output

    def _read(self, arguments: dict[str, Any], cached: bool) -> dict[str, PackedBatch]:
        """The packing of each side, "" and "decoder", that has tokens."""
        source, _ = tokens_of(arguments)
        target, _ = tokens_of(arguments, "decoder_") if self.decodes else (None, None)
        if self.decodes and target is None:
            target = self._labels(arguments)
        if source is None and target is not None:
            self._require_nothing_of_an_encoder(arguments)
        sides = {"": (source, ONE_SIDE if target is None else SOURCE), "decoder": (target, TARGET)}
        return {
            side: self._packing(arguments, side, tokens, names, cached)
            for side, (tokens, names) in sides.items()
            if tokens is not None
        }

    def _require_nothing_of_an_encoder(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments that tell documents of an encoder without tokens."""
        mask = arguments.get("attention_mask")
        numbered = isinstance(mask, Tensor) and mask.numel() and int(mask.max()) > 1
        told = [name for name in ("position_ids", "seq_idx") if arguments.get(name) is not None]
        for name in [*told, *(["attention_mask"] if numbered else [])]:
            raise ValueError(
                f"{name} tells documents of the encoder, and {self.name} was given tokens of the decoder alone. Pass "
                f"decoder_{name}."
            )

    def _require_no_states(self, arguments: dict[str, Any]) -> None:
        """Refuse states of an encoder of text: they belong to packed rows."""
        if arguments.get("encoder_outputs") is not None and "input_ids" in self.names:
            raise ValueError(
                f"{self.name} runs each document in a row of its own, and encoder_outputs are of packed rows. Pass "
                "input_ids and leave encoder_outputs out."
            )

    def _labels(self, arguments: dict[str, Any]) -> Tensor | None:
        """The labels, if the model makes its decoder's tokens of them."""
        labels = arguments.get("labels")
        shifts = getattr(self.module.config, "is_encoder_decoder", False) and not self.name.endswith(HEADS_SHIFT)
        of_tokens = isinstance(labels, Tensor) and labels.ndim == (2 if self.books == 1 else 3)
        return labels if shifts and of_tokens else None

    def _packing(
        self, arguments: dict[str, Any], side: str, tokens: Tensor, names: Mapping[str, str], cached: bool
    ) -> PackedBatch:
        shape = torch.Size(tokens.shape[:2])
        said = {name: arguments.get(here) for name, here in names.items()}
        mask = said["attention_mask"]
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise ValueError(
                f"{names['attention_mask']} must be two-dimensional, 0 for padding and 1, or a document's number, for "
                f"tokens; got {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}. "
                f"{self.name} runs with one document a row, and makes other masks itself."
            )
        if cached and mask is not None and mask.shape != shape:  # it covers the cache, too
            said["attention_mask"] = None
        ids = tokens if tokens.ndim == 2 else None
        if tokens.ndim == 3 and self.books > 1:
            ids = common_to_codebooks(tokens)
        pad = pad_token_of(self.module.config, side)
        pad = padding_of_tables(self.module) if pad is None else pad
        packed_batch = make_packed_batch({**said, "input_ids": ids}, shape, tokens.device, UNUSED, pad)
        if cached:
            require_one_document_a_row(
                packed_batch,
                f"{self.name} runs with one document a row, so packed rows can't use a cache. Leave the cache out.",
            )
        return packed_batch


def warn_of_rows(name: str, how: str, why: str = "") -> None:
    """Warn once that packing doesn't make a class faster. `how` its documents run, and `why`, in parentheses."""
    notices.say_once(
        f"document-rows-{name.lower()}",
        f"{name} can't keep several documents in a row apart{why}, so each gets a row of its own, in {how}: exact, and "
        "no faster than without packing.",
    )


def padding_of_tables(module: nn.Module) -> int | None:
    """The padding token that all token tables of a model name; FastSpeech 2's configuration doesn't have it."""
    sizes = {getattr(one.config, "vocab_size", None) for one in module.modules() if isinstance(one, PreTrainedModel)}
    tables = [inner for inner in module.modules() if isinstance(inner, nn.Embedding) and inner.num_embeddings in sizes]
    found = {table.padding_idx for table in tables}
    return found.pop() if len(found) == 1 else None


def needs_calls_alone(module: nn.Module) -> bool:
    """Whether documents of one length change each other in one call.

    They do if a layer mixes the rows of a batch, or if a model of sound predicts how many frames each token becomes:
    such models pad the frames, and compute as if the padding were sound.
    """
    return any(hasattr(inner, "duration_predictor") or type(inner).__name__ in MIXES_ROWS for inner in module.modules())
