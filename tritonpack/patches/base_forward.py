"""The forward of a patched module: it makes masks, counts positions, and runs the layers."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.masks.intervals import PAIRS_REMEDY
from tritonpack.patches import families, guards
from tritonpack.patches.compact import replace_by_row
from tritonpack.patches.configurations import is_bidirectional, require_one_rope, rope_limits, text_config
from tritonpack.patches.encoder_decoder import cross_attention_mask
from tritonpack.patches.forwards import takes_dense_mask
from tritonpack.patches.interface import FUNCTIONS, NAMES
from tritonpack.patches.layers.mixers import DocumentByDocument
from tritonpack.patches.layers.positions import ROPE_INDEX, from_padding, leave_positions_to_model
from tritonpack.patches.modules import holds, modules_in
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.parse_inputs import COUNTED, LazyMask, cache_of, make_packed_batch, require_depths, tokens_of
from tritonpack.patches.parts import Call, Checkpoints, InstanceForward
from tritonpack.patches.pipeline import Pipeline
from tritonpack.patches.placement import Placement, require_one_document_a_row


class BaseForward(Pipeline):
    """The forward of a patched module, which takes tokens and an attention mask.

    It is made for an `AppliedPatch` from all patched `modules` and the forwards of `layers`.

    Attributes:
        heads: the forwards of the models that users may call, this one included.
        checkpoints: the checkpointing functions of the module's layers; None if no layer reads the packed batch.
        mixes: whether layers of the module mix tokens along the row.
        outermost: whether no other patched module holds this one.
        compaction: removes padding and common beginnings from calls; None without `unpad` and `share_prefixes`.
    """

    def __init__(
        self, module: PreTrainedModel, applied: Any, modules: list[PreTrainedModel], layers: list[InstanceForward]
    ) -> None:
        super().__init__(module, applied.context)
        attention = "dense" if takes_dense_mask(module) else applied.options.attention
        self.serving = Serving(attention, applied.options.backend, self.context.require_active)
        self.report, self.heads, self.compaction = applied.report, applied.heads, applied.compaction
        self.checkpoints = Checkpoints(module, self.context) if layers else None
        self.mixes = any(isinstance(forward, DocumentByDocument) for forward in layers)
        self.outermost = not any(other is not module and holds(other, module) for other in modules)
        config = module.config
        self.model_type = config.model_type
        rotary = getattr(config, "position_embedding_type", "") == "rotary"  # ESM's count all tokens of a row
        counts = self.model_type in families.COUNT_FROM_PADDING and not rotary
        # The index for padding in a table of absolute positions: the padding token's id, or another one.
        index = getattr(getattr(module, "embeddings", None), "padding_idx", None)
        self.padding_index = (config.pad_token_id or 0 if index is None else index) if counts else None
        self.padding = config.pad_token_id if self.model_type in families.MASKS_PADDING else None
        self.rope_limits = rope_limits(text_config(config))
        self.needs_types = self.model_type in families.BOTH_WAYS | families.PROMPT_TYPES and is_bidirectional(config)
        self.checks_begin = bool(self.needs_types or self.rope_limits or "perm_mask" in self.names)
        # A multimodal model makes positions itself: they depend on its images, too.
        multimodal = any(hasattr(type(inner), ROPE_INDEX) for inner in modules_in(module))
        self.gives_positions = "position_ids" in self.names and not multimodal

    def run_packed(self, arguments: dict[str, Any], packed_batch: PackedBatch | None) -> Any:
        """Run the module. Meanwhile the context holds the packed batch for its layers."""
        compiled = torch.compiler.is_compiling()
        reads_lengths = self.mixes or self.compaction is not None
        prepare = self._prepare_outside_of_graphs if compiled and reads_lengths else self._prepare
        arguments = dict(arguments)
        for name in self.unaccepted:
            arguments.pop(name, None)
        packed_batch, layer_batch, placements = prepare(arguments, packed_batch, compiled)
        outer = self.context.current
        if outer.running:  # inside of another patched module, which has set it
            layer_batch = outer.packed_batch
        call = Call(outer.outer_batch if packed_batch is None else packed_batch, True, layer_batch)
        output = self.context.run(call, self.run_inner, **arguments)
        positions_counted = self.outermost and packed_batch is not None and packed_batch.positions_counted
        if positions_counted and isinstance(output, dict) and (cache := cache_of(output)) is not None:
            setattr(cache, COUNTED, True)
        for placement in placements:
            output = placement.lay_back_all(output)
        return output

    def _prepare(
        self, arguments: dict[str, Any], packed_batch: PackedBatch | None, compiled: bool
    ) -> tuple[PackedBatch | None, PackedBatch | None, list[Placement]]:
        """Replace the arguments of a call by the arguments of the module.

        Returns the packed batch of the call; the packed batch for layers, None if rows continue a cache; and the
        placements of the call's tokens in the row that runs in its place, in the order in which outputs are laid back.
        """
        self._require_ours(arguments, compiled)
        placements: list[Placement] = []
        layer_batch = None
        if packed_batch is not None:
            row = packed_batch.row
            if packed_batch.tree_ends is not None and row is None:
                if arguments.get("use_cache"):
                    raise ValueError(
                        "use_cache=True was passed, but no sequence can continue a tree's cache. Leave use_cache out."
                    )
                if self.outermost:
                    require_depths(packed_batch)
            to_compact = row is None or row.shared is not None  # else a head has removed padding and common beginnings
            if self.compaction is not None and to_compact and not self.context.current.running:
                packed_batch, placements = self._compact_rows(packed_batch, arguments)
            if self.makes_positions:
                leave_positions_to_model(packed_batch, arguments)
            if self.gives_positions:
                ids = arguments.get("position_ids")
                # Without position ids from the user, a head has counted them along the row.
                of_row = self.outermost and packed_batch.position_ids is None and ids is not None and ids.ndim == 2
                if ids is None or of_row or (self.padding_index is not None and not packed_batch.shared):
                    self._give_positions(packed_batch, arguments)
            if self.mixes and self.outermost and not packed_batch.shared:
                packed_batch = packed_batch.replace(by_document=self._runs_by_document(packed_batch, arguments))
            one_row = packed_batch.row is not None or packed_batch.tree_ends is not None
            if self.takes_cache and (one_row or packed_batch.by_document):
                arguments["use_cache"] = False  # no sequence could continue it
            arguments["attention_mask"] = packed_batch
            if not packed_batch.cached or _is_empty(cache_of(arguments)):
                layer_batch = packed_batch
                if compiled or self.checks_begin:
                    self._begin(packed_batch, arguments, compiled)
        if arguments.get("encoder_hidden_states") is not None and tokens_of(arguments)[0] is not None:
            mask = cross_attention_mask(arguments, layer_batch, self.names, self.serving)
            arguments["encoder_attention_mask"] = mask
        if self.checkpoints is not None:
            self.checkpoints.wrap()
        return packed_batch, layer_batch, placements

    _prepare_outside_of_graphs = torch.compiler.disable(_prepare)  # a graph would fit only the lengths that it reads

    def _compact_rows(
        self, packed_batch: PackedBatch, arguments: dict[str, Any]
    ) -> tuple[PackedBatch, list[Placement]]:
        """Replace a batch by a row without padding and common beginnings, unless a head has removed the padding."""
        if not self.outermost:  # such as OPT's decoder, which its head calls
            around = next(head for head in self.heads if isinstance(head, BaseForward) and head.outermost)
            raise UnsupportedModelError(
                f"this call of {self.name} doesn't go through the {around.name} around it, which removes padding and "
                "common beginnings. Leave unpad and share_prefixes out."
            )
        assert self.compaction is not None
        placements = []
        if packed_batch.row is None and not packed_batch.compacted:
            packed_batch = self.compaction(packed_batch, arguments)
            placements += [] if packed_batch.row is None else [packed_batch.row.placement]
        row = packed_batch.row
        if row is not None and row.shared is not None:
            placements.insert(0, row.shared)
            packed_batch = replace_by_row(packed_batch, row.shared, arguments, None, None, tree_ends=row.ends, row=row)
        return packed_batch, placements

    def _require_ours(self, arguments: dict[str, Any], compiled: bool) -> None:
        """Refuse a call if another library has replaced its attention, mask or rows since the patch."""
        chosen, ours = self.module.config._attn_implementation_internal, NAMES[self.serving.attention]
        if type(arguments.get("cache")).__name__ == "PagedAttentionCache":  # its manager was made before the patch
            raise UnsupportedModelError(guards.CONTINUOUS_BATCHING)
        if chosen != ours:
            raise ValueError(
                f"the attention implementation was set to {chosen!r} after this model was patched. It would mix "
                "documents. Call tritonpack.unpatch(model) before you set another one."
            )
        if not self.outermost:
            return
        for name, function in ALL_ATTENTION_FUNCTIONS.items():
            if isinstance(function, FunctionType) and function.__module__.startswith(guards.ULYSSES):
                raise UnsupportedModelError(guards.ULYSSES_SHARDS.format(name))
        torchs = nn.functional.scaled_dot_product_attention
        if isinstance(torchs, FunctionType) and torchs.__module__.startswith(guards.CONTEXT_PARALLEL):
            raise UnsupportedModelError(guards.CONTEXT_PARALLEL_SHARDS)
        if ALL_ATTENTION_FUNCTIONS.get(ours) is not FUNCTIONS[ours]:
            guards.refuse_other_attention(ours)
        if compiled:
            return
        if self.serving.attention == "dense":
            guards.require_masks_kept(self.module)  # no function of tritonpack's sees the mask of these layers
        for head in self.heads:
            if (head.one_result or arguments.get("output_router_logits")) and not head.in_place:
                raise ValueError(
                    f"the forward of {head.name} was replaced after this model was patched, so its results of whole "
                    "rows would mix documents. Replace the forward before you patch the model: call "
                    "tritonpack.unpatch(model), then tritonpack.patch(model)."
                )

    def read(self, arguments: dict[str, Any], head: Pipeline) -> PackedBatch | None:
        """Read the packed batch of a call of a head, or of this module.

        None if its masks are already made, or if the model itself refuses the call.
        """
        mask, outer = arguments.get("attention_mask"), self.context.current.outer_batch if self.outermost else None
        if head is not self and isinstance(mask, PackedBatch):
            return mask
        ids, cache = arguments.get("input_ids"), cache_of(arguments)
        tokens = arguments.get("inputs_embeds") if ids is None else ids
        shape = torch.Size() if tokens is None else tokens.shape if ids is not None else tokens.shape[:-1]
        if head is not self and len(shape) == 3:
            if head.has_choices:
                flat = {name: x.flatten(0, 1) for name, x in arguments.items() if getattr(x, "shape", ())[:3] == shape}
                if (packed_batch := self.read(arguments | flat, head)) is not None:
                    head.require_result_of_each(packed_batch)
            return None
        reads_pairs = isinstance(mask, Tensor) and mask.ndim == 4 and self.outermost and outer is None
        reads_pairs = reads_pairs and (head is self or cache is None)  # a head's mask beside a cache is from generate()
        if not (reads_pairs or mask is None or getattr(mask, "ndim", 0) == 2):
            if head is self:
                arguments["attention_mask"] = self._resolve_mask(mask, arguments)
            return None
        if tokens is None or len(shape) != 2:
            return mask if isinstance(mask, PackedBatch) else None
        known = mask if isinstance(mask, PackedBatch) else outer
        if known is not None and known.marks_documents:
            if known.tokens == shape:
                known = known if known.serving == self.serving else known.replace(serving=self.serving)
                return known if self.padding is None else self._without_padding(known, arguments)
            require_one_document_a_row(
                known,
                f"{self.name} runs on {tuple(shape)} tokens, but the model around it was given "
                f"{tuple(known.tokens)}, so it can't keep packed documents apart. Give each document its own row.",
            )
        if isinstance(mask, PackedBatch):
            arguments["attention_mask"] = mask = mask.to_tensor()
        if mask is None and cache is not None and self.model_type in families.PLACES_FROM_MASK:
            columns, _ = cache.get_mask_sizes(shape[1], 0)
            arguments["attention_mask"] = torch.ones((shape[0], columns), dtype=torch.long, device=tokens.device)
        packed_batch = make_packed_batch(arguments, shape, tokens.device, self.serving, self.pad_token, reads_pairs)
        packed_batch.cached = cache is not None
        packed_batch.compacted = known is not None and known.compacted and known.tokens == shape
        if reads_pairs and packed_batch.cached and not _is_empty(cache):
            raise ValueError(
                "attention_mask is a mask of pairs of tokens, which must cover whole rows, but the cache already holds "
                "tokens. Pass a two-dimensional mask that also covers the cached tokens, or no cache."
            )
        return packed_batch if self.padding is None else self._without_padding(packed_batch, arguments)

    def _without_padding(self, packed_batch: PackedBatch, arguments: dict[str, Any]) -> PackedBatch:
        """Return the packed batch of a family that treats padding tokens as padding if it gets no mask."""
        ids = arguments.get("input_ids")
        if ids is None or packed_batch.cached or packed_batch.attention_mask is not None:
            return packed_batch
        real = ids != self.padding
        if "encoder_hidden_states" not in self.names:
            require(
                (real | ~packed_batch.not_padding()).all(),
                "input_ids hold padding tokens. Without a mask, this model's encoder treats them as padding, and its "
                "decoder as tokens. Pass attention_mask.",
            )
        elif self.module.training or arguments.get("use_cache") is False:
            return packed_batch.replace(attention_mask=real.int())
        return packed_batch

    def _resolve_mask(self, mask: Any, arguments: dict[str, Any]) -> Any:
        """Resolve a mask that generate() made before the call, or a dict of them for the kinds of layers."""
        if isinstance(mask, dict):
            return {kind: self._resolve_mask(value, arguments) for kind, value in mask.items()}
        if isinstance(mask, LazyMask):
            resolved = mask.resolve(arguments, self.serving)
            return resolved.dense(torch.float32) if self.serving.attention == "dense" else resolved
        if isinstance(mask, Tensor) and mask.ndim > 2 and self.outermost:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; a patched model makes masks of pairs of tokens itself. "
                f"{PAIRS_REMEDY}"
            )
        return mask

    def _begin(self, packed_batch: PackedBatch, arguments: dict[str, Any], compiled: bool) -> None:
        """Check a call that covers whole rows, because nothing is cached yet, and add what its layers need."""
        if self.needs_types and arguments.get("token_type_ids") is None:
            raise ValueError(
                f"{self.name} with use_bidirectional_attention sees both directions in a batch without padding and one "
                "direction in a batch with padding, unless token_type_ids mark the tokens that see both. Pass "
                "token_type_ids to the whole model: 0 for a document's image and prompt, 1 for its answer."
            )
        if self.outermost:
            for kind, limit in self.rope_limits:
                require_one_rope(packed_batch, kind, limit)
        if "perm_mask" in self.names and arguments.get("perm_mask") is None:  # XLNet's
            arguments["perm_mask"] = (~packed_batch.document_mask().to_tensor()[:, 0]).float()
        if compiled:
            parts = self.module.modules()
            packed_batch.recomputed = any(getattr(part, "gradient_checkpointing", False) for part in parts)

    def _give_positions(self, packed_batch: PackedBatch, arguments: dict[str, Any]) -> None:
        """Give a call positions that restart in each document, also if it continues a cache with such positions."""
        if not packed_batch.cached and packed_batch.marks_documents:
            if self.padding_index is None:
                arguments["position_ids"] = packed_batch.positions()
            else:
                arguments["position_ids"] = from_padding(packed_batch, arguments.get("input_ids"), self.padding_index)
            packed_batch.positions_counted = True
        elif getattr(cache_of(arguments), COUNTED, False) and packed_batch.attention_mask is not None:
            arguments["position_ids"] = packed_batch.continued_positions()

    def _runs_by_document(self, packed_batch: PackedBatch, arguments: dict[str, Any]) -> bool:
        """Return whether recurrent layers run on each document by itself, without a cache."""
        (rows, row_length), cached, mask = packed_batch.tokens, packed_batch.cached, packed_batch.attention_mask
        if cached and packed_batch.boundaries is None and (row_length == 1 or packed_batch.position_ids is None):
            return False
        if cached and mask is not None:
            packed_batch = packed_batch.replace(attention_mask=mask[:, -row_length:])
        _, length = packed_batch.lengths()
        whole = length.numel() == rows and bool((length == row_length).all())  # nothing packed, nothing padded
        padded = length.numel() <= rows
        if cached and not padded:
            raise ValueError(
                "layers of this model mix tokens along the row and keep one state for each row, so packed rows can't "
                "use a cache. Leave the cache out."
            )
        keeps_state = padded and (cached or arguments.get("use_cache"))
        reads_padding = self.model_type in families.READS_PADDING
        if keeps_state and reads_padding and not bool(packed_batch.not_padding()[:, 0].all()):
            raise ValueError(
                f"with use_cache=True the recurrent layers of {self.name} would read the padding on the left into "
                "their state, as in stock transformers. Pass use_cache=False, pad on the right, or generate from "
                "prompts of one length at a time."
            )
        return not whole and not cached and not keeps_state


def _is_empty(cache: Any) -> bool:
    """Return whether the cache of a call is known to be empty. A cache of fixed size has its length on the device."""
    if cache is None:
        return True
    try:
        length = cache.get_seq_length()
    except (AttributeError, ValueError):  # it holds states of recurrent layers, not keys
        return False
    return isinstance(length, int) and length == 0
