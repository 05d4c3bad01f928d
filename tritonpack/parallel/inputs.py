"""The arguments of one rank's forward pass: its rows of a batch's tokens, positions, labels and other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.checks import is_int
from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.consistency import require_same_batch
from tritonpack.parallel.fused_head import FUSED_HEAD, OWN_ARGUMENTS, FusedHead
from tritonpack.parallel.loss import ShardedLoss, shift, shifts
from tritonpack.parallel.masks import ShardedBatch, shard_batch
from tritonpack.parallel.router_loss import require_known_loss, wants_router_loss
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.parallel.validate import find_base
from tritonpack.patches.configurations import require_one_rope
from tritonpack.patches.layers.positions import from_padding
from tritonpack.patches.mask_spec import MaskSpec
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import TREE, cache_of, in_form, make_packed_batch
from tritonpack.patches.parts import parameters_of
from tritonpack.patches.targets import IGNORED, check_padding_labels

# Arguments whose values `shard_inputs` replaces or drops.
REPLACED = (
    "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position",
    "position_ids", "labels", "shift_labels", "logits_to_keep",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's share of a batch.

    Attributes:
        batch: this rank's documents, positions and masks, and how the whole batch is divided.
        loss: the loss function of this call; None without labels.
        head: TRL's fused head, if this call asks for it; it computes a loss of its own.
        arguments: the model's arguments.
    """

    batch: ShardedBatch
    loss: ShardedLoss | None
    head: FusedHead | None
    arguments: dict[str, Any]


def shard_inputs(module: PreTrainedModel, arguments: dict[str, Any], shared: Any, specs: Sequence[MaskSpec]) -> Shard:
    """This rank's share of a forward pass. Every rank calls this with the same full batch.

    Args:
        module: the called model.
        arguments: the arguments of the call, by name.
        shared: the context, a `SequenceParallel`.
        specs: the masks of all layers, whose work layouts divide evenly.

    Raises:
        ValueError: on every rank, if one of them can't shard its arguments, or if arguments differ between ranks.
    """
    error = None
    try:
        arguments = in_form(arguments)
        whole, targets = _read(arguments, module)
    except Exception as problem:
        error = problem
    if shared.check_batches:
        circumstances = _circumstances(module, shared)
        require_same_batch(shared.ranks, error, arguments | circumstances, shared.compared.next())
    elif error is not None:
        raise error
    batch = shard_batch(whole, specs, shared)
    sharding = shared.sharding = batch.sharding
    sharded = {name: _own_rows(x, sharding) for name, x in arguments.items() if name not in REPLACED}
    sharded["attention_mask"] = batch
    if whole.position_ids is not None:
        sharded["position_ids"] = batch.position_ids
    base = find_base(module)
    if base is not None and (base.takes_cache or "use_cache" in parameters_of(type(module))):
        sharded["use_cache"] = False
    loss = head = None
    if targets is not None:
        own = sharding.shard(targets, fill=_ignored(arguments))
        if arguments.get(FUSED_HEAD):
            head = FusedHead(sharding, arguments)
            sharded = {name: x for name, x in sharded.items() if name not in OWN_ARGUMENTS}
            sharded |= {FUSED_HEAD: True, "shift_labels": own}
        else:
            loss = ShardedLoss(module, sharding, own, targets)
            sharded |= loss.arguments(arguments)
    return Shard(batch, loss, head, sharded)


def _circumstances(module: PreTrainedModel, shared: Any) -> dict[str, Any]:
    """What decides which exchanges a call makes, beside its arguments. Errors name it by these words."""
    device, called = module.device.type, [one is module for one in shared.shared_modules]
    return {
        "the model that is called": called.index(True) if any(called) else None,
        "gradient checkpointing": any(getattr(part, "gradient_checkpointing", False) for part in module.modules()),
        "autocast": str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off",
    }


def _read(arguments: dict[str, Any], module: PreTrainedModel) -> tuple[PackedBatch, Tensor | None]:
    """Read the arguments of a call; refuses arguments that can't be sharded.

    Returns:
        The documents; the target of each token, or None without labels.
    """
    tokens, device = _tokens(arguments)
    _refuse_arguments(arguments, tokens, module)
    base = find_base(module)
    if base is None:
        raise ValueError(
            "the model was unpatched inside of SequenceParallel. Leave the context first; it restores a model that it "
            "has patched itself."
        )
    if base.codebooks != 1:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds the embeddings of {base.codebooks} rows for each token; sequence "
            "parallelism shards arguments with one row per token."
        )
    packed_batch = make_packed_batch(arguments, tokens, device, base.serving)
    packed_batch.runs()  # raises for padding inside a document
    check_padding_labels(module, arguments, packed_batch)
    if arguments.get("position_ids") is None and "position_ids" in base.names and not base.gives_positions:
        raise UnsupportedModelError(
            f"{type(module).__name__} computes positions from all tokens of a batch. Pass position_ids, such as its "
            "get_rope_index returns."
        )
    for kind, limit in base.rope_limits:
        require_one_rope(packed_batch, kind, limit)
    if base.padding_place is not None:  # documents may hold padding tokens on other ranks
        positions = from_padding(packed_batch, arguments.get("input_ids"), base.padding_place)
        packed_batch = packed_batch.replace(boundaries=packed_batch.runs()[0], position_ids=positions)
    return packed_batch, _targets(arguments, tokens, module)


def _tokens(arguments: dict[str, Any]) -> tuple[torch.Size, torch.device]:
    """The shape (B, T) of a call's tokens, and their device."""
    ids, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    tokens = embeddings if ids is None else ids
    if (ids is None) == (embeddings is None) or not isinstance(tokens, Tensor):
        raise ValueError("pass either input_ids or inputs_embeds, as a tensor of the whole batch.")
    shape = tokens.shape[:-1] if ids is None else tokens.shape
    if len(shape) != 2:
        raise ValueError(f"tokens must be (batch, length); got {tuple(tokens.shape)}.")
    if not shape.numel():
        raise ValueError(f"a batch needs at least one token; got tokens of shape {tuple(shape)}.")
    return shape, tokens.device


def _refuse_arguments(arguments: dict[str, Any], tokens: torch.Size, module: PreTrainedModel) -> None:
    """Raise for arguments that can't be divided into rows of tokens."""
    if arguments.get("use_cache") or cache_of(arguments) is not None:
        raise ValueError(
            "sequence parallelism computes whole sequences without a cache; leave out the cache and use_cache. "
            "To generate, leave the context, or pause it: `with context.paused(): model.generate(...)`."
        )
    if wants_router_loss(arguments, module):
        require_known_loss(module)
    if arguments.get(TREE) is not None:
        raise UnsupportedModelError(
            f"{TREE} says that sequences share tokens, and sequence parallelism shards documents that lie one after "
            "the other. Give each sequence all of its tokens."
        )
    kept = arguments.get("logits_to_keep")
    if kept is not None and not (is_int(kept) and kept == 0):
        raise ValueError(
            "logits_to_keep names tokens of whole rows, and each rank computes the logits of its own tokens. Leave it "
            "out: a rank has only its share of the logits. With gather_outputs=True select rows of the output."
        )
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        given = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be two-dimensional, 0 for padding; got {given}. Mark documents by position_ids, "
            "cu_seq_lens_q, seq_idx or numbers in the mask."
        )
    known = (*REPLACED, "input_ids", "inputs_embeds")
    for name, value in arguments.items():
        parts = value if isinstance(value, (tuple, list)) else [value]
        tensors = [x for x in parts if isinstance(x, Tensor)]
        if name not in known and any(x.ndim and x.shape[:2] != tokens for x in tensors):
            raise UnsupportedModelError(
                f"{name} has shape {', '.join(str(tuple(x.shape)) for x in tensors)}, which doesn't begin with the "
                f"shape of the tokens, {tuple(tokens)}. Sequence parallelism can only shard arguments with one row per "
                "token. For images and sounds, embed all tokens on every rank and pass inputs_embeds."
            )


def _own_rows(x: Any, sharding: Sharding) -> Any:
    """This rank's rows of a tensor with one row per token, also within a tuple or list; other values unchanged."""
    if isinstance(x, (tuple, list)):
        parts = [_own_rows(part, sharding) for part in x]
        return tuple(parts) if isinstance(x, tuple) else parts
    return sharding.shard(x) if isinstance(x, Tensor) and x.shape[:2] == sharding.tokens else x


def _targets(arguments: dict[str, Any], tokens: torch.Size, module: PreTrainedModel) -> Tensor | None:
    """The target of each token, of the shape `tokens`; None without labels."""
    labels, targets = arguments.get("labels"), arguments.get("shift_labels")
    own_head = bool(arguments.get(FUSED_HEAD))  # it reads shift_labels alone, and needs no loss function
    if labels is None and (targets is None or not own_head):
        return None
    shifting = own_head or shifts(module.loss_function)
    for name, given in (("labels", labels), ("shift_labels", targets)):
        if given is not None and given.shape != tokens:
            raise ValueError(f"{name} must have the shape of the tokens, {tuple(tokens)}; got {tuple(given.shape)}.")
    if targets is not None or labels is None:
        return targets
    return shift(labels, _ignored(arguments)) if shifting and labels is not None else labels


def _ignored(arguments: dict[str, Any]) -> int:
    """The label that marks tokens without a target in this call."""
    return arguments.get("ignore_index", IGNORED)
