"""`shard`, the stage of a patched model's pipeline in which ranks divide a batch (`patches/pipeline.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tritonpack.checks import is_int
from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.consistency import PARAMETERS, require_same
from tritonpack.parallel.loss import FUSED_HEAD, FusedHead, ShardedLoss, fuses_loss, shifts
from tritonpack.parallel.masks import ShardedBatch, shard_batch
from tritonpack.parallel.replaced import replaced
from tritonpack.parallel.router_loss import require_known_loss, with_router_loss
from tritonpack.parallel.shard_and_gather import Sharding, between_graphs, outside_of_graphs
from tritonpack.patches.configurations import follows_longest, layer_windows, require_one_rope
from tritonpack.patches.interface import NO_WEIGHTS, takes_tokens
from tritonpack.patches.layers.positions import from_padding
from tritonpack.patches.mask_spec import CAUSAL, WHOLE_DOCUMENT, MaskSpec
from tritonpack.patches.modules import holds
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import TREE, cache_of, check_arguments
from tritonpack.patches.pipeline import Pipeline
from tritonpack.patches.targets import IGNORED, check_padding_labels

# Arguments that the stage replaces or drops.
REPLACED = (
    "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position",
    "position_ids", "labels", "shift_labels", "logits_to_keep",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's share of a call.

    Attributes:
        batch: this rank's documents, positions and masks, and how the whole batch is divided.
        arguments: the model's arguments.
        loss: how the loss of all ranks' targets is computed; None without labels.
        routers: whether the call asks for the loss of routers.
    """

    batch: ShardedBatch
    arguments: dict[str, Any]
    loss: ShardedLoss | FusedHead | None
    routers: bool


class ShardStage:
    """Runs a user's call on this rank's rows. It takes the place of the other stages of a `Pipeline`.

    Attributes:
        context: the `SequenceParallel`.
        number: the place of the model among the models of the context.
        specs: the masks of all layers, whose work layouts divide evenly.
        rotary: the rotary embeddings whose frequencies depend on the longest document of a batch.
        fuses_loss: whether the model's forward is Liger-Kernel's.
    """

    def __init__(self, context: Any, number: int, module: PreTrainedModel) -> None:
        self.context, self.number = context, number
        self.specs, self.rotary = layer_specs(module), _rotary_of_longest(module)
        self.fuses_loss = fuses_loss(module)

    @between_graphs
    def __call__(self, forward: Pipeline, arguments: dict[str, Any]) -> Any:
        """The output of this rank's rows, or of the whole batch with `gather_outputs`.

        Raises:
            ValueError: on every rank, if one of them can't shard its arguments, or if arguments differ between ranks.
        """
        module = forward.module
        shard = self._shard(forward, arguments)
        with ExitStack() as stack:
            stack.callback(shard.batch.forget)
            if self.rotary:
                whole = shard.batch.whole
                last = (whole.positions() if whole.position_ids is None else whole.position_ids).max()
                for rotary in self.rotary:
                    replaced(stack, rotary, "forward", partial(_to_last, rotary.forward, last))
            if isinstance(shard.loss, ShardedLoss):
                replaced(stack, module, "_loss_function", shard.loss)
            output = forward.run_packed(shard.arguments, shard.batch)
        if not shard.batch.attended:
            raise UnsupportedModelError(
                f"{forward.name} converts attention_mask before attention, so layers saw only this rank's tokens. "
                "Train it without SequenceParallel."
            )
        return self._finish(module, output, shard)

    @outside_of_graphs
    def _shard(self, forward: Pipeline, arguments: dict[str, Any]) -> Shard:
        """This rank's share of a call. Every rank calls this with the same full batch."""
        context, module, error = self.context, forward.module, None
        try:
            routers = arguments.get("output_router_logits")
            if routers is None:
                routers = getattr(module.config.get_text_config(), "output_router_logits", False)
            if forward.path == "":
                self._require_heads_in_place(module)
            whole = _read(forward, arguments)
            if routers:
                require_known_loss(module)
            targets = _targets(arguments, whole.tokens, module)
        except Exception as problem:
            error = problem
        if context.check_batches:
            device = module.device.type
            given = arguments | {  # errors name what decides exchanges, beside the arguments, by these words
                "the model that is called": self.number,
                "gradient checkpointing": module.is_gradient_checkpointing,
                "autocast": str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off",
                "whether gradients are computed": torch.is_grad_enabled(),
                PARAMETERS: next(context.compared),
            }
            require_same(context.ranks, error, given)
        elif error is not None:
            raise error
        batch = shard_batch(whole, self.specs, context)
        sharding = context.sharding = batch.sharding
        sharded: dict[str, Any] = {}
        for name, x in arguments.items():
            if name not in REPLACED:
                rows = isinstance(x, Tensor) and x.shape[:2] == sharding.tokens
                sharded[name] = sharding.shard(x) if rows else x
        if whole.position_ids is not None:
            sharded["position_ids"] = batch.position_ids
        if forward.base.takes_cache or "use_cache" in forward.names:
            sharded["use_cache"] = False
        loss: ShardedLoss | FusedHead | None = None
        if targets is not None:
            ignored, items = arguments.get("ignore_index", IGNORED), arguments.get("num_items_in_batch")
            own = sharding.shard(targets, fill=ignored)
            if arguments.get(FUSED_HEAD):
                loss = FusedHead(sharding, own, arguments)
            else:
                items = (targets != ignored).sum() if items is None else items
                loss = ShardedLoss(module.loss_function, self.fuses_loss, sharding, own, items)
            sharded |= loss.arguments()
        return Shard(batch, sharded, loss, bool(routers))

    def _require_heads_in_place(self, module: PreTrainedModel) -> None:
        """Refuse a call by a forward that has replaced the forward of a head around this module since.

        It would compare this rank's rows with the labels of the whole batch.
        """
        for head in self.context.heads:
            if not head.gone and head.module is not module and not head.in_place and holds(head.module, module):
                raise UnsupportedModelError(
                    f"the forward of {head.name} was replaced inside of SequenceParallel, so it would compare the "
                    "rows of one rank with the labels of all. Replace it before the context is entered: apply "
                    "Liger-Kernel there, or with Trainer's use_liger_kernel."
                )

    @outside_of_graphs
    def _finish(self, module: PreTrainedModel, output: Any, shard: Shard) -> Any:
        """The output for the whole batch with `gather_outputs`, else for this rank's rows."""
        if not isinstance(output, ModelOutput):
            raise UnsupportedModelError(
                f"{type(module).__name__} returns a {type(output).__name__}; sequence parallelism needs a ModelOutput "
                "of transformers, whose names say what each output is."
            )
        if isinstance(shard.loss, FusedHead):
            return shard.loss.finish(output)
        if shard.loss is not None:
            shard.loss.finish(module, output)
        if shard.routers:
            loss = None if shard.loss is None else shard.loss.result
            with_router_loss(output, module, shard.batch, loss)
        for name, value in list(output.items()):
            if name not in ("loss", "aux_loss") and value is not None:
                output[name] = self._rows(module, name, value, shard.batch.sharding)
        return output

    def _rows(self, module: PreTrainedModel, name: str, value: Any, sharding: Sharding) -> Any:
        """One output, gathered with `gather_outputs`; refuses an output without one row per token."""
        if isinstance(value, tuple):
            return tuple(self._rows(module, name, one, sharding) for one in value)
        gathers, rows = self.context.gather_outputs, sharding.rows
        if isinstance(value, Tensor) and name != "pooler_output":
            if value.shape[:2] == (1, rows):
                return sharding.gather(value) if gathers else value
            if value.ndim and value.shape[0] == rows:  # (rows, ...), such as a router's logits
                return sharding.gather(value[None]).flatten(0, 1) if gathers else value
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UnsupportedModelError(
            f"{type(module).__name__} returns {name} ({given}) without one row per token, so a rank can't compute it "
            "from its own tokens. Train it without SequenceParallel."
        )


class Cover(Pipeline):
    """Shards the calls of a forward that other code has put over the forward of a patch, such as TRL's fused head.

    That forward would compare this rank's rows with the labels of the whole batch.

    Attributes:
        below: the forward that is covered.
    """

    def __init__(self, below: Pipeline) -> None:
        super().__init__(below.module, below.context, below.base)
        self.below, self.proof = below, below.proof

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outside = self.shard.context.running and self.context.current.outer_batch is None
        return super().__call__(*args, **kwargs) if outside else self.inner(*args, **kwargs)


def _targets(arguments: dict[str, Any], tokens: torch.Size, module: PreTrainedModel) -> Tensor | None:
    """The target of each token, of the shape `tokens`; None without labels."""
    labels, targets = arguments.get("labels"), arguments.get("shift_labels")
    own_head = bool(arguments.get(FUSED_HEAD))  # it reads shift_labels alone, and needs no loss function
    if labels is None and (targets is None or not own_head):
        return None
    shifted = own_head or shifts(module.loss_function)
    for name, given in (("labels", labels), ("shift_labels", targets)):
        if given is not None and given.shape != tokens:
            raise ValueError(f"{name} must have the shape of the tokens, {tuple(tokens)}; got {tuple(given.shape)}.")
    if targets is not None or labels is None or not shifted:
        return labels if targets is None else targets
    # the last token of a row has none
    return nn.functional.pad(labels[:, 1:], (0, 1), value=arguments.get("ignore_index", IGNORED))


def _read(forward: Pipeline, arguments: dict[str, Any]) -> PackedBatch:
    """The documents of a call; refuses arguments that can't be divided into rows of tokens."""
    check_arguments(arguments, forward.name, forward.known)
    base, ids, embeddings = forward.base, arguments.get("input_ids"), arguments.get("inputs_embeds")
    tokens = embeddings if ids is None else ids
    if (ids is None) == (embeddings is None) or not isinstance(tokens, Tensor):
        raise ValueError("pass either input_ids or inputs_embeds, as a tensor of the whole batch.")
    shape = tokens.shape[:-1] if ids is None else tokens.shape
    if len(shape) != 2:
        raise ValueError(f"tokens must be (batch, length); got {tuple(tokens.shape)}.")
    if not shape.numel():
        raise ValueError(f"a batch needs at least one token; got tokens of shape {tuple(shape)}.")
    if arguments.get("output_attentions"):
        raise UnsupportedModelError(NO_WEIGHTS)
    if arguments.get("use_cache") or cache_of(arguments) is not None:
        raise ValueError(
            "sequence parallelism computes whole sequences without a cache; leave out the cache and use_cache. "
            "To generate, leave the context, or pause it: `with context.paused(): model.generate(...)`."
        )
    if arguments.get(TREE) is not None:
        raise UnsupportedModelError(
            f"{TREE} says that sequences share tokens, which ranks can't divide. Give each sequence all of its tokens."
        )
    kept, mask = arguments.get("logits_to_keep"), arguments.get("attention_mask")
    if kept is not None and not (is_int(kept) and kept == 0):
        raise ValueError(
            "logits_to_keep names tokens of whole rows, and each rank computes the logits of its own tokens. Leave it "
            "out, or select rows of the output with gather_outputs=True."
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        given = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be two-dimensional, 0 for padding; got {given}. Mark documents by position_ids, "
            "cu_seq_lens_q, seq_idx or numbers in the mask."
        )
    for name, value in arguments.items():
        if name in REPLACED or name in ("input_ids", "inputs_embeds"):
            continue
        for x in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(x, Tensor) and x.ndim and (x is not value or x.shape[:2] != shape):
                given = str(tuple(x.shape)) + ("" if x is value else f" in a {type(value).__name__}")
                raise UnsupportedModelError(
                    f"{name} has shape {given}, and sequence parallelism can only shard tensors with one row per "
                    f"token, which begin with {tuple(shape)}. For images and sounds, embed all tokens on every rank "
                    "and pass inputs_embeds."
                )
    if arguments.get("position_ids") is None and "position_ids" in base.names and not base.gives_positions:
        raise UnsupportedModelError(
            f"{forward.name} computes positions from all tokens of a batch. Pass position_ids, such as its "
            "get_rope_index returns."
        )
    whole = base.read(arguments, forward)
    starts, _ = whole.runs()  # raises for padding inside a document
    if forward.mixed_loss and arguments.get("labels") is not None:
        forward.require_no_mixed_loss(whole)
    if whole.attention_mask is not None:
        check_padding_labels(forward.module, arguments, whole)
    for kind, limit in base.rope_limits:
        require_one_rope(whole, kind, limit)
    if base.padding_index is not None:  # documents may hold padding tokens on other ranks
        positions = from_padding(whole, arguments.get("input_ids"), base.padding_index)
        whole = whole.replace(boundaries=starts, position_ids=positions)
    return whole


def layer_specs(module: PreTrainedModel) -> tuple[MaskSpec, ...]:
    """The masks of all layers, for layouts."""
    config = module.config.get_text_config()
    # Only towers that take tokens count: towers of images see both directions in any model.
    if any(getattr(inner, "is_causal", True) is False and takes_tokens(inner) for inner in module.modules()):
        return (WHOLE_DOCUMENT,)
    chunk, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None) or ()
    if chunk and any("chunk" in kind for kind in kinds):
        return tuple(MaskSpec.of((-1, 0), chunk if "chunk" in kind else None) for kind in kinds)
    return tuple(MaskSpec.of((window - 1, 0)) if window else CAUSAL for window in layer_windows(config)) or (CAUSAL,)


def _rotary_of_longest(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model whose frequencies depend on the longest document (dynamic, longrope)."""
    found = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None) or ""
        if any(map(follows_longest, kind.values() if isinstance(kind, dict) else [kind])):
            found.append(module)
    return found


def _to_last(
    forward: Callable[..., tuple[Tensor, Tensor]],
    last: Tensor,
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """cos and sin of a rotary embedding, whose frequencies fit the position `last`, too."""
    longer = torch.cat([position_ids, last.expand_as(position_ids[..., :1])], -1)
    return tuple(one[..., :-1, :] for one in forward(x, longer, *args, **kwargs))
