"""SequenceParallel: inside of it, a model shares every batch among the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, nn

from tritonpack.checks import check_choice, check_flag
from tritonpack.parallel.attention import Exchange
from tritonpack.parallel.comm import as_ranks
from tritonpack.parallel.consistency import require_same_batch, require_same_settings
from tritonpack.parallel.layouts import LayoutName, make_layout
from tritonpack.parallel.sharded_batch import ShardedBatch, fill_up, shard_batch
from tritonpack.parallel.sharded_forward import ShardedForward
from tritonpack.parallel.sharding import GradReduce, Sharding
from tritonpack.parallel.validate import (
    compared_parameters,
    find_packing_hook,
    require_reduction,
    require_shardable,
    shared_modules,
)
from tritonpack.patches import patch
from tritonpack.patches.mask_spec import MaskSpec
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.patching import Patch

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike

MIN_ROWS = 2  # per rank: with them every layout gives every rank some, as models can't be run on none

# axolotl's names, and what they are here.
SCHEMES: dict[str, tuple[Exchange, LayoutName]] = {
    "varlen_llama3": ("all_gather", "contiguous"),
    "batch_ring": ("ring", "contiguous"),
    "batch_zigzag": ("ring", "zigzag"),
    "batch_stripe": ("ring", "stripe"),
}


class SequenceParallel:
    """A context in which a model shares every batch among the ranks of a group: same loss, same gradients.

    Every rank passes the same full batch, packed or padded, of any length:

    ```python
    with tritonpack.SequenceParallel(model, mesh["sp"]):
        loss = model(**batch).loss  # that of one device, on every rank
        loss.backward()             # DDP or FSDP over (dp, sp) averages to the gradients of one device
    ```

    Inside, each rank runs the model on its own rows: tokens, embeddings, positions and labels are sharded, labels after
    they are shifted; attention gets the keys and values of other ranks; losses are summed over ranks and divided by the
    number of all targets, or by `num_items_in_batch` where that is passed. Logits and hidden states are this rank's
    rows, (1, rows, ...), unless `gather_outputs` is set; `logits_to_keep` means the tokens of the whole batch. The
    objective is the mean over ranks of the losses that they compute: a loss of your own that every rank computes alike
    from gathered outputs, such as GRPO's or DPO's, needs nothing; one of which each rank computes a part must be
    multiplied by the number of ranks, or summed by `total`.

    The model inside of a head shares what it is called with likewise. `inputs_embeds` that need gradients get them for
    this rank's rows. Dropout in attention is refused, as which pairs are dropped would depend on the layout.

    Models are patched on entry where they aren't. Leaving restores them, also after an exception. Contexts nest: the
    innermost counts.

    Args:
        model_or_models: a transformers model, a module that holds one (DDP, PEFT), or several, such as policy and
            reference.
        group_or_mesh: the ranks that share a batch: a process group, a one-dimensional DeviceMesh, or None for the
            whole world.
        exchange: how keys and values travel, as `tritonpack.parallel.attend` takes it: "all_gather", "ring" or
            "ulysses". axolotl's names stand for both choices: "varlen_llama3" (all_gather, contiguous), "batch_ring"
            (ring, contiguous), "batch_zigzag" and "batch_stripe" (ring).
        layout: which rows a rank has, as `tritonpack.parallel.make_layout` takes it: "contiguous", "zigzag", "stripe"
            or "balanced", which reads the mask, so it waits for the device once per forward. None means the one that
            axolotl's name for `exchange` stands for, and "balanced" for others.
        heads_k_stride: key heads per step of "all_gather", as in `attend`.
        gather_outputs: return the outputs of the whole batch, (B, T, ...), on every rank, differentiably.
        grad_reduce: how gradients are reduced over the ranks afterwards: "mean", as DDP and FSDP do, or "sum".
        check_batches: compare batches between ranks before each forward, a small exchange that waits for the device;
            without it, batches that differ end in a hang or wrong numbers.

    Raises:
        ValueError: on every rank: settings that are unknown or differ between ranks, and in a forward pass, batches
            that differ, a batch without tokens, a cache, arguments that can't be sharded, parameters that have come
            apart; a DDP or FSDP module that doesn't reduce gradients over these ranks.
        UnsupportedModelError: (a ValueError) a model that can't be patched, or has layers that need more of other ranks
            than keys and values: recurrences, convolutions, dense masks, a loss computed otherwise than by its loss
            function.
    """

    def __init__(
        self,
        model_or_models: nn.Module | Sequence[nn.Module],
        group_or_mesh: GroupLike = None,
        *,
        exchange: str = "all_gather",
        layout: str | None = None,
        heads_k_stride: int | None = None,
        gather_outputs: bool = False,
        grad_reduce: GradReduce = "mean",
        check_batches: bool = True,
    ) -> None:
        self.ranks = as_ranks(group_or_mesh)
        several = isinstance(model_or_models, (list, tuple))
        self.models: list[Any] = list(model_or_models) if several else [model_or_models]  # type: ignore[arg-type]
        self.exchange: Any = exchange  # names are checked on entry, where every rank hears of an error
        self.layout: Any = layout
        self.heads_k_stride, self.gather_outputs = heads_k_stride, gather_outputs
        self.grad_reduce, self.check_batches = grad_reduce, check_batches
        self.entered, self._paused = False, False
        self._forwards: list[ShardedForward] = []
        self._patches: list[Patch] = []
        self._parameters: list[Tensor] = []
        self._sharing: Sharding | None = None

    def __enter__(self) -> SequenceParallel:
        if self.entered:
            raise ValueError("this context is entered already; make another one to nest them.")
        self.entered = True
        error: Exception | None = None
        try:
            self.exchange, self.layout = _scheme(self.exchange, self.layout)
            if self.grad_reduce not in get_args(GradReduce):
                raise ValueError(f"grad_reduce must be 'mean' or 'sum'; got {self.grad_reduce!r}.")
            check_flag(self.gather_outputs, "gather_outputs")
            check_flag(self.check_batches, "check_batches")
            self._prepare()
        except Exception as problem:
            error = problem
        settings = {
            name: getattr(self, name)
            for name in (
                "exchange",
                "layout",
                "heads_k_stride",
                "gather_outputs",
                "grad_reduce",
                "check_batches",
            )
        }
        settings["models"] = [type(model).__name__ for model in self.models]
        try:
            require_same_settings(self.ranks, error, settings)
        except Exception:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def running(self) -> bool:
        """Whether forwards are shared at the moment."""
        return self.entered and not self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run models whole on every rank meanwhile, patched as they are: to generate, or on batches that aren't shared.

        Gradients of what runs inside are the rank's own.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows, (1, rows, ...), of a tensor (B, T, ...) that goes with the last forward's batch.

        Raises:
            ValueError: another shape, or no forward yet.
        """
        return self._last().shard(x)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' rows, (1, rows, ...) each, as (B, T, ...) in the batch's order, differentiably.

        Raises:
            ValueError: as `shard`.
        """
        return self._last().gather(x)

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks of their parts of a loss: equal on all, with the gradients that one device would compute.

        Raises:
            ValueError: no forward yet.
        """
        return self._last().total(part)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel({', '.join(type(model).__name__ for model in self.models)}: rank {self.ranks.rank} of "
            f"{self.ranks.size}, exchange={self.exchange!r}, layout={self.layout!r})"
        )

    def __deepcopy__(self, _: Any) -> SequenceParallel:
        return self  # a copy of a model is still in the same context

    def require_same_batch(self, arguments: dict[str, Any], error: Exception | None) -> None:
        """Compare a batch with those of the other ranks."""
        if self.check_batches:
            require_same_batch(self.ranks, error, arguments, self._parameters)

    def share(self, packed_batch: PackedBatch, spec: MaskSpec) -> ShardedBatch:
        """Lay a batch out over the ranks by what layers see of it.

        Args:
            packed_batch: of the batch.
            spec: of the layers that see most.
        """
        batch, length = packed_batch.tokens
        columns = max(-(-MIN_ROWS * self.ranks.size // batch) - length, 0)
        filled = fill_up(packed_batch, columns)
        mask = filled.interval_mask(length + columns, 0, 0, spec).mask
        layout = make_layout(self.layout, mask, self.ranks.size)
        sharding = Sharding(
            self.ranks, layout, packed_batch.tokens, columns, self.exchange, self.heads_k_stride, self.grad_reduce
        )
        self._sharing = sharding
        return shard_batch(packed_batch, filled, sharding)

    def _last(self) -> Sharding:
        if self._sharing is None:
            raise ValueError("no batch has been shared yet: run a model's forward inside of the context first.")
        return self._sharing

    def _prepare(self) -> None:
        """Patch the models and put ourselves before their forwards."""
        if not self.models:
            raise ValueError("expected a model, or several; got [].")
        for model in self.models:
            if not isinstance(model, nn.Module):
                patch(model)  # which refuses it, and says what it is instead
            require_reduction(model, self.ranks)
            hook = find_packing_hook(model)
            if hook is None:
                self._patches.append(patch(model))
            require_shardable(model, self._patches[-1].report if hook is None else hook.patch.report)
            for module in shared_modules(model):
                self._forwards.append(ShardedForward(module, self))
        self._parameters = compared_parameters(self.models)

    def _restore(self) -> None:
        self.entered = False
        for forward in reversed(self._forwards):
            forward.remove()
        for handle in reversed(self._patches):
            handle.unpatch()
        self._forwards, self._patches = [], []
        self._parameters, self._sharing = [], None


def _scheme(exchange: Any, layout: Any) -> tuple[Exchange, LayoutName]:
    """The exchange and the layout that names stand for; raises for unknown ones."""
    check_choice(exchange, (*get_args(Exchange), *SCHEMES), "exchange")
    if layout is not None:
        check_choice(layout, get_args(LayoutName), "layout")
    if exchange not in SCHEMES:
        return exchange, layout or "balanced"
    implied = SCHEMES[exchange]
    if layout not in (None, implied[1]):
        raise ValueError(
            f"exchange={exchange!r} has the layout {implied[1]!r}; got layout={layout!r}. Leave the layout out, or "
            f"pass exchange={implied[0]!r} with it."
        )
    return implied
