"""The forward of a model inside of SequenceParallel: shards the inputs, runs this rank's rows, gathers the outputs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.inputs import Shard, shard_inputs
from tritonpack.parallel.loss import computing_loss
from tritonpack.parallel.masks import ShardedBatch, ShardedMask
from tritonpack.parallel.rotary import following_longest, rotary_of_longest
from tritonpack.parallel.router_loss import wants_router_loss, with_router_loss
from tritonpack.parallel.shard_and_gather import between_graphs, outside_of_graphs
from tritonpack.patches.applied_patch import base_of
from tritonpack.patches.configurations import layer_windows
from tritonpack.patches.interface import takes_tokens
from tritonpack.patches.mask_spec import CAUSAL, WHOLE_DOCUMENT, MaskSpec
from tritonpack.patches.parts import InstanceForward, PackingContext


class ShardedForward(InstanceForward):
    """Replaces the forward of one model instance. Batches are sharded here alone.

    It calls the patched forward with this rank's share. A hook can't shard, because PEFT and some trainers call
    `model.forward`, which runs no hooks.

    Attributes:
        shared: the context, a `SequenceParallel`.
        base: the forward of the patched module; None for a head around one.
        specs: the masks of all layers, whose work layouts divide evenly.
    """

    def __init__(self, module: PreTrainedModel, shared: Any) -> None:
        super().__init__(module, PackingContext())
        self.shared, self.base = shared, base_of(module)
        self.specs, self.rotary = _layer_specs(module), rotary_of_longest(module)
        if self.base is not None:
            self.base.sharded += 1
        self.install()

    def remove(self) -> None:
        if self.installed and self.base is not None:
            self.base.sharded -= 1
        super().remove()

    @property
    def is_covered(self) -> bool:
        """Whether other code has put a forward over this one that may call something else, such as TRL's fused head."""
        return self.installed and not self.in_place

    @between_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _end_graph(args, kwargs)
        shard = self._shard(self.bound(args, kwargs))
        return self.inner(*args, **kwargs) if shard is None else self._run_shard(shard)

    @between_graphs
    def _run_shard(self, shard: Shard) -> Any:
        """The output of this rank's share of a call."""
        wanted = shard.arguments.get("return_dict")
        as_tuple = not (getattr(self.module.config, "return_dict", True) if wanted is None else wanted)
        arguments = {**shard.arguments, "return_dict": True} if as_tuple else shard.arguments
        computing = nullcontext() if shard.loss is None else computing_loss(self.module, shard.loss)
        try:
            with following_longest(self.rotary, shard.batch.whole), computing:
                output = self.inner(**arguments)
        finally:
            shard.batch.forget()
        if not shard.batch.attended:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} converts attention_mask before attention, so layers saw only this "
                "rank's tokens. Train it without SequenceParallel."
            )
        output = self._finish(output, shard)
        return output.to_tuple() if as_tuple else output

    @outside_of_graphs
    def _shard(self, arguments: dict[str, Any]) -> Shard | None:
        """This rank's share of a call; None if the model must run on the unchanged arguments."""
        if not self.shared.running or _is_sharded(arguments.get("attention_mask")) or self._is_inside():
            return None
        self._require_heads_in_place()
        return shard_inputs(self.module, arguments, self.shared, self.specs)

    def _require_heads_in_place(self) -> None:
        """Refuse a call by a forward that has replaced the forward of a head around this module since.

        It would compare this rank's rows with the labels of the whole batch.
        """
        latest = {id(other.module): other for other in self.shared.forwards if not other.gone}
        for other in latest.values():
            if other.is_covered and other is not self and any(part is self.module for part in other.module.modules()):
                raise UnsupportedModelError(
                    f"the forward of {other.name} was replaced inside of SequenceParallel, so it would compare the "
                    "rows of one rank with the labels of all. Replace it before the context is entered: apply "
                    "Liger-Kernel there, or with Trainer's use_liger_kernel."
                )

    def _is_inside(self) -> bool:
        """Whether a sharded model around this one is running, and may not have passed its mask on (RWKV's head)."""
        told = None if self.base is None else self.base.context.current.told
        return told is not None and told.shared

    @outside_of_graphs
    def _finish(self, output: Any, shard: Shard) -> Any:
        """The output for the whole batch with `gather_outputs`, else for this rank's rows."""
        if not isinstance(output, ModelOutput):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} returns a {type(output).__name__}; sequence parallelism needs a "
                "ModelOutput of transformers, whose names say what each output is."
            )
        if shard.head is not None:
            return shard.head.finish(output)
        if shard.loss is not None:
            shard.loss.finish(self.module, output)
        if wants_router_loss(shard.arguments, self.module):
            loss = None if shard.loss is None else shard.loss.result
            with_router_loss(output, self.module, shard.batch.sharding, shard.batch.live(), loss)
        for name, value in list(output.items()):
            if name not in ("loss", "aux_loss") and value is not None:
                output[name] = self._rows(name, value, shard)
        return output

    def _rows(self, name: str, value: Any, shard: Shard) -> Any:
        """One output, gathered with `gather_outputs`; refuses an output without one row per token."""
        if isinstance(value, tuple):
            return tuple(self._rows(name, one, shard) for one in value)
        gathers, sharding = self.shared.gather_outputs, shard.batch.sharding
        if isinstance(value, Tensor) and name != "pooler_output":
            if value.shape[:2] == (1, sharding.rows):
                return sharding.gather(value) if gathers else value
            if value.ndim and value.shape[0] == sharding.rows:  # (rows, ...), such as a router's logits
                return sharding.gather(value[None]).flatten(0, 1) if gathers else value
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UnsupportedModelError(
            f"{type(self.module).__name__} returns {name} ({given}) without one row per token, so a rank can't compute "
            "it from its own tokens. Train it without SequenceParallel."
        )


def _end_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let `torch.compile(model, fullgraph=True)` raise with the reason why graphs end here.

    The compiler ignores functions without tensors among their arguments.
    """
    _outside()


@outside_of_graphs
def _outside() -> None:
    pass


def _is_sharded(mask: Any) -> bool:
    """Whether a mask, or a dict of masks for each kind of layer, comes from a sharded model around this one."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    return any(isinstance(one, (ShardedBatch, ShardedMask)) for one in masks)


def _layer_specs(module: PreTrainedModel) -> tuple[MaskSpec, ...]:
    """The masks of all layers, for layouts."""
    config = module.config.get_text_config()
    # Only towers that take tokens count: towers of images see both directions in any model.
    if any(getattr(inner, "is_causal", True) is False and takes_tokens(inner) for inner in module.modules()):
        return (WHOLE_DOCUMENT,)
    chunk, kinds = getattr(config, "attention_chunk_size", None), getattr(config, "layer_types", None) or ()
    if chunk and any("chunk" in kind for kind in kinds):
        return tuple(MaskSpec.of((-1, 0), chunk if "chunk" in kind else None) for kind in kinds)
    return tuple(MaskSpec.of((window - 1, 0)) if window else CAUSAL for window in layer_windows(config)) or (CAUSAL,)
