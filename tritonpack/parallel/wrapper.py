"""The forward of a model that shares its batch among ranks: it shards what comes in, runs the model on this rank's rows
and makes of what comes out what one device would give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tritonpack.checks import is_int, require
from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.loss import IGNORED, ShardedLoss, computing_loss, shift, shifts
from tritonpack.parallel.rotary import LongestPosition
from tritonpack.parallel.sharded_batch import ShardedBatch, ShardedMask
from tritonpack.parallel.sharing import Kept, Sharing, exchanges
from tritonpack.parallel.validate import is_patched, packing_hook
from tritonpack.patches.call_arguments import CACHES, in_form
from tritonpack.patches.mask_spec import CAUSAL, MaskSpec
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import make_packed_batch
from tritonpack.patches.report import layer_windows
from tritonpack.patches.rope import require_one_rope
from tritonpack.patches.towers import takes_tokens

if TYPE_CHECKING:
    from tritonpack.parallel.context import SequenceParallel

# Arguments that the packing has read, and that mean nothing to a shard.
READ = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position")


@dataclass(frozen=True, eq=False)
class Batch:
    """What a forward pass was called with, the same on every rank.

    Attributes:
        packed_batch: its documents.
        kept: numbers of the flattened batch's tokens that logits are wanted of, in the logits' shape; None for all.
        targets: (B, T) or like `kept`, what each token is to predict; None without labels.
        arguments: all by name, but for those that the packing has read.
    """

    packed_batch: PackedBatch
    kept: Tensor | None
    targets: Tensor | None
    arguments: dict[str, Any]

    def compared(self) -> dict[str, Any]:
        """What has to be equal on all ranks."""
        packed_batch = self.packed_batch
        read = {"attention_mask": packed_batch.attention_mask, "boundaries": packed_batch.boundaries}
        return {**self.arguments, **read, "position_ids": packed_batch.position_ids}


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's part of a batch, with what its model is to be called with."""

    packed_batch: ShardedBatch
    kept: Kept | None
    loss: ShardedLoss | None
    arguments: dict[str, Any]


class ShardedForward:
    """Stands for one model's forward, as an attribute of that instance: whoever calls it, hooks or not, gets it."""

    def __init__(self, module: PreTrainedModel, context: SequenceParallel) -> None:
        self.module, self.context = module, context
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]
        self.own = module.__dict__.get("forward")  # somebody else's, such as accelerate's
        self.coming: Shard | None = None
        self.spec = _widest_spec(module)
        self.rotary = LongestPosition(module)
        module.forward = self
        # A model that is patched itself has a hook which reads the packing: the shard must be made before it.
        self.hook = None
        if is_patched(module):
            self.hook = module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward it stands for: trainers ask which columns of a dataset a model takes."""
        return inspect.signature(self.inner)

    @property
    def inner(self) -> Callable[..., Any]:
        return self.own if self.own is not None else type(self.module).forward.__get__(self.module)

    def remove(self) -> None:
        """Give the model its own forward back; under another that was put on since, once that is gone."""
        self.rotary.remove()
        if self.hook is not None:
            self.hook.remove()
        while isinstance(top := self.module.__dict__.get("forward"), ShardedForward) and not top.context.entered:
            del self.module.__dict__["forward"]
            if top.own is not None:
                self.module.__dict__["forward"] = top.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        shard, self.coming = self.coming, None
        made = shard is not None and arguments.get("attention_mask") is shard.packed_batch
        if shard is None or not made:  # no hook made one, or it was for a call that never came
            shard = self._prepare(args, kwargs)
            if shard is None:
                return self.inner(*args, **kwargs)
            arguments = shard.arguments
        wanted = arguments.get("return_dict")
        if wanted is None:  # as PEFT passes it
            wanted = getattr(self.module.config, "return_dict", True)
        as_tuple = not wanted
        if as_tuple:
            arguments = {**arguments, "return_dict": True}
        computing = nullcontext() if shard.loss is None else computing_loss(self.module, shard.loss)
        try:
            with self.rotary.of(shard.packed_batch.whole), computing:
                output = self.inner(**arguments)
        finally:
            shard.packed_batch.forget()
        if not shard.packed_batch.attended:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} makes something else of its mask before attention gets it, so layers "
                "saw one rank's tokens alone; sequence parallelism can't do that."
            )
        output = self._finish(output, shard)
        return output.to_tuple() if as_tuple else output

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.coming = self._prepare(args, kwargs)
        return None if self.coming is None else ((), self.coming.arguments)

    @exchanges
    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shard | None:
        """This rank's shard of a call; None for one that isn't to be shared, or that is a shard already."""
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        top = self.module.__dict__.get("forward")  # of the innermost context, which counts
        whole = isinstance(top, ShardedForward) and top.context.entered and not top.context.running
        if whole or not self.context.running or _is_sharded(arguments.get("attention_mask")):
            return None
        try:
            batch = self._read(arguments)
        except Exception as error:
            self.context.require_same_batch({}, error)
            raise
        self.context.require_same_batch(batch.compared(), None)
        packed_batch = self.context.share(batch.packed_batch, self.spec)
        sharing = packed_batch.sharing
        kept = None if batch.kept is None else sharing.keep(batch.kept)
        loss = None
        if batch.targets is not None:
            ignored = _ignored(batch.arguments)
            targets = sharing.shard(batch.targets, fill=ignored) if kept is None else kept.pick(batch.targets)
            loss = ShardedLoss(self.module.loss_function, sharing, targets, batch.targets)
        return Shard(packed_batch, kept, loss, self._shard(batch, packed_batch, kept, loss))

    def _read(self, arguments: dict[str, Any]) -> Batch:
        """What a call says about the whole batch; refuses what can't be sharded."""
        arguments = in_form(arguments)
        hook = packing_hook(self.module)
        tokens, device = _tokens(arguments)
        _refuse_arguments(arguments, tokens, self.module)
        if hook.codebooks != 1:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} adds up the embeddings of {hook.codebooks} rows for each of its tokens; "
                "sequence parallelism shards one row per token."
            )
        packed_batch = make_packed_batch(arguments, tokens, device, hook.serving)
        packed_batch.runs()  # raises for torn documents
        if arguments.get("position_ids") is None and "position_ids" in hook.names and not hook.gives_positions:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} makes positions of its own from all tokens of a batch; pass "
                "position_ids, such as its get_rope_index returns."
            )
        for kind, limit in hook.rope_limits:
            require_one_rope(packed_batch, kind, limit)
        kept = _kept(arguments.get("logits_to_keep"), tokens, device)
        return Batch(packed_batch, kept, self._targets(arguments, tokens, kept), _without(arguments, READ))

    def _targets(self, arguments: dict[str, Any], tokens: torch.Size, kept: Tensor | None) -> Tensor | None:
        labels, targets = arguments.get("labels"), arguments.get("shift_labels")
        if labels is None:
            return None
        shifting = shifts(self.module.loss_function)
        if targets is None:
            if labels.shape != tokens:
                raise ValueError(
                    f"labels must have the shape of the tokens, {tuple(tokens)}; got {tuple(labels.shape)}."
                )
            targets = shift(labels, _ignored(arguments)) if shifting else labels
        wanted = tokens if kept is None else kept.shape
        if targets.shape != wanted:
            raise ValueError(
                f"logits are computed of tokens of shape {tuple(wanted)}, so their targets must have that shape; got "
                f"{tuple(targets.shape)}. Pass shift_labels, the target of each token kept, beside labels."
            )
        return targets

    def _shard(
        self, batch: Batch, packed_batch: ShardedBatch, kept: Kept | None, loss: ShardedLoss | None
    ) -> dict[str, Any]:
        """The arguments that the model is called with."""
        sharing = packed_batch.sharing
        others = _without(batch.arguments, ("labels", "shift_labels", "position_ids"))
        sharded = {name: _own_rows(x, sharing) for name, x in others.items()}
        sharded["attention_mask"] = packed_batch
        if batch.packed_batch.position_ids is not None:
            sharded["position_ids"] = packed_batch.position_ids
        if loss is not None:
            sharded["labels"] = loss.targets
        if kept is not None:
            sharded["logits_to_keep"] = kept.local
        if "use_cache" in self.names:
            sharded["use_cache"] = False
        return sharded

    @exchanges
    def _finish(self, output: Any, shard: Shard) -> Any:
        """The output as one device would give it, or, if that isn't asked for, this rank's rows of it."""
        if not isinstance(output, ModelOutput):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} returns a {type(output).__name__}; sequence parallelism needs one of "
                "transformers' outputs, to know what is what."
            )
        for name, value in list(output.items()):
            if name != "loss" and value is not None:
                output[name] = self._whole(name, value, shard)
        return output

    def _whole(self, name: str, value: Any, shard: Shard) -> Any:
        if isinstance(value, tuple):
            return tuple(self._whole(name, one, shard) for one in value)
        gathers, sharing = self.context.gather_outputs, shard.packed_batch.sharing
        if isinstance(value, Tensor) and name != "pooler_output":
            if "logits" in name and shard.kept is not None and value.shape[:2] == (1, shard.kept.local.shape[0]):
                return sharing.gather_kept(value, shard.kept) if gathers else value
            if value.shape[:2] == (1, sharing.rows):
                return sharing.gather(value) if gathers else value
            if value.ndim and value.shape[0] == sharing.rows:  # tokens alone, such as a router's logits
                return sharing.gather(value[None]).flatten(0, 1) if gathers else value
        described = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UnsupportedModelError(
            f"{type(self.module).__name__} returns {name} ({described}), which isn't made of one row per token, so a "
            "rank can't tell what it would be of the whole batch; sequence parallelism can't do that."
        )


def _widest_spec(module: PreTrainedModel) -> MaskSpec:
    """What those layers see of their documents that see most of them: layouts balance their work."""
    config = module.config.get_text_config()
    windows = layer_windows(config)
    # Towers that turn images into embeddings see both directions, whatever the text does.
    if any(getattr(inner, "is_causal", True) is False and takes_tokens(inner) for inner in module.modules()):
        return MaskSpec((-1, -1))
    if not windows or None in windows:
        return CAUSAL
    return MaskSpec((max(filter(None, windows)) - 1, 0))


def _tokens(arguments: dict[str, Any]) -> tuple[torch.Size, torch.device]:
    """The shape (B, T) of a call's tokens, and their device."""
    given, embeddings = arguments.get("input_ids"), arguments.get("inputs_embeds")
    tokens = given if given is not None else embeddings
    if (given is None) == (embeddings is None) or not isinstance(tokens, Tensor):
        raise ValueError("pass either input_ids or inputs_embeds, as a tensor of the whole batch.")
    shape = tokens.shape if given is not None else tokens.shape[:-1]
    if len(shape) != 2:
        raise ValueError(f"tokens must be (batch, length); got {tuple(tokens.shape)}.")
    if not shape.numel():
        raise ValueError(f"a batch needs at least one token; got tokens of shape {tuple(shape)}.")
    return shape, tokens.device


def _is_sharded(mask: Any) -> bool:
    """Whether a mask is one rank's, from the module around this one, which may have made the masks of all layers."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    return any(isinstance(one, (ShardedBatch, ShardedMask)) for one in masks)


def _refuse_arguments(arguments: dict[str, Any], tokens: torch.Size, module: PreTrainedModel) -> None:
    """Raise for arguments that mean more than a shard of them can."""
    if arguments.get("use_cache") or any(arguments.get(name) is not None for name in CACHES):
        raise ValueError(
            "sequence parallelism computes whole sequences without a cache; leave out past_key_values and use_cache. "
            "To generate, leave the context, or pause it: `with context.paused(): model.generate(...)`."
        )
    router = arguments.get("output_router_logits")
    if router or (router is None and getattr(module.config.get_text_config(), "output_router_logits", False)):
        raise UnsupportedModelError(
            "output_router_logits=True adds a loss over the routing of all tokens, and each rank has some of them; set "
            "it to False."
        )
    mask = arguments.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        described = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be two-dimensional, 0 for padding; got {described}. Mark documents by position_ids, "
            "cu_seq_lens_q, seq_idx or numbers in the mask."
        )
    known = (*READ, "input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels", "logits_to_keep")
    for name, value in _without(arguments, known).items():
        parts = value if isinstance(value, (tuple, list)) else [value]
        if any(isinstance(x, Tensor) and x.ndim and x.shape[:2] != tokens for x in parts):
            shapes = ", ".join(str(tuple(x.shape)) for x in parts if isinstance(x, Tensor))
            raise UnsupportedModelError(
                f"{name} has shape {shapes}, which doesn't begin with that of the tokens, {tuple(tokens)}; sequence "
                "parallelism knows how to shard one row per token alone."
            )


def _own_rows(x: Any, sharing: Sharing) -> Any:
    """This rank's rows of an argument that has one per token, or of those in a tuple; others as they are."""
    if isinstance(x, (tuple, list)):
        parts = [_own_rows(part, sharing) for part in x]
        return tuple(parts) if isinstance(x, tuple) else parts
    return sharing.shard(x) if isinstance(x, Tensor) and x.shape[:2] == sharing.tokens else x


def _kept(given: Any, tokens: torch.Size, device: torch.device) -> Tensor | None:
    """The tokens to compute logits of, as transformers means `logits_to_keep`; None for all."""
    if given is None or (is_int(given) and given == 0):
        return None
    batch, length = tokens
    every = torch.arange(tokens.numel(), device=device).view(tokens)
    if is_int(given) and given > 0:
        return every[:, -given:]
    if isinstance(given, Tensor) and given.dtype == torch.bool and given.shape == tokens:
        return every[given.to(device)]
    if isinstance(given, Tensor) and not given.is_floating_point() and given.dtype != torch.bool:
        columns = given.to(device).long()
        if columns.ndim == 1 or (columns.ndim == 2 and columns.shape[0] == batch):
            inside = ((columns >= -length) & (columns < length)).all()
            require(inside, f"logits_to_keep must hold places in rows of {length} tokens.")
            return every.gather(1, (columns % length).expand(batch, -1))
    described = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
    raise ValueError(
        "logits_to_keep must be how many of each row's last tokens, places in the rows, (k,) or (batch, k), or a bool "
        f"mask like the tokens, {tuple(tokens)}; got {described}."
    )


def _ignored(arguments: dict[str, Any]) -> int:
    """The label of tokens without a target, which transformers' losses take from a call."""
    return arguments.get("ignore_index", IGNORED)


def _without(arguments: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}
