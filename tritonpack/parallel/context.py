"""SequenceParallel: the context in which the ranks of a group share every batch of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tritonpack.checks import check_flag
from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.comm import as_ranks
from tritonpack.parallel.consistency import compared_parameters, require_reduction, require_same, require_shardable
from tritonpack.parallel.dimensions import dimensions_of
from tritonpack.parallel.layouts import check_layout_name
from tritonpack.parallel.shard import Cover, ShardStage
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.parallel.trainers import unwatch, watch
from tritonpack.patches import patch
from tritonpack.patches.applied_patch import applied_to
from tritonpack.patches.patching import Patch
from tritonpack.patches.pipeline import Pipeline
from tritonpack.removed import refuse_removed

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike


class SequenceParallel:
    """A context in which the ranks of a group share every batch of a model, with the loss and gradients of one device.

    Every rank passes the same full batch, packed or padded, of any length:

    ```python
    with tritonpack.SequenceParallel(model, mesh["sp"]):
        loss = model(**batch).loss  # the loss of one device, on every rank
        loss.backward()             # DDP or FSDP over (dp, sp) averages to the gradients of one device
    ```

    Each rank runs the model on its own rows of tokens, embeddings, positions and labels, which are shifted before. The
    loss is the sum over all targets, divided by their number or by `num_items_in_batch`. Logits and hidden states are
    this rank's rows, (1, rows, ...), unless `gather_outputs` is set. `inputs_embeds` get gradients for this rank's
    rows. A base model that is called without its head shares its batch, too.

    The objective is the mean over ranks of their losses. So a loss of your own that every rank computes alike from
    gathered outputs, such as GRPO's or DPO's, needs no change. Sum a loss of which each rank computes a part with
    `total`.

    While a Trainer of transformers or TRL trains, evaluates or predicts in the context, its own loader gives the ranks
    of a group one batch, and it counts the group as one process. Models that aren't patched are patched on entry.
    Leaving restores them, also after an exception.

    Args:
        model_or_models: a transformers model, a module that holds one (DDP, PEFT), or several, such as policy and
            reference.
        group_or_mesh: the ranks that share a batch: a process group, a DeviceMesh of one or two dimensions, or None for
            the whole world.
        exchange: how keys and values travel, as in `tritonpack.parallel.attend`: "auto", "all_gather", "group_cast",
            "ring" or "ulysses"; for a mesh of two dimensions a pair such as ("group_cast", "ulysses").
        layout: which rows a rank owns, as in `tritonpack.parallel.make_layout`: "documents", "contiguous", "zigzag" or
            "stripe". The first one waits for the device once per forward. With a pair of exchanges, the ranks that
            divide heads own rows together, and each of them gets a run of these.
        gather_outputs: return the outputs of the whole batch, (B, T, ...), on every rank, differentiably.
        check_batches: compare batches between ranks before each forward, which waits for the device. Without it,
            batches that differ may give wrong numbers, or ranks wait until the time limit of the group.

    Raises:
        ValueError: on every rank: settings that are unknown or differ between ranks, a model that is in another
            context, and a DDP or FSDP module that doesn't reduce gradients over these ranks. In a forward pass: batches
            that differ, a batch without tokens, a cache, dropout in attention, arguments that can't be sharded,
            parameters that differ between ranks.
        UnsupportedModelError: (a ValueError) a model that can't be patched, or needs more of other ranks than
            layers exchange: dense masks, a loss computed otherwise than by its loss function.
    """

    def __init__(
        self,
        model_or_models: nn.Module | Sequence[nn.Module],
        group_or_mesh: GroupLike = None,
        *,
        exchange: str | tuple[str, str] = "auto",
        layout: str = "documents",
        gather_outputs: bool = False,
        check_batches: bool = True,
        **removed: Any,
    ) -> None:
        refuse_removed(removed, "SequenceParallel()")
        several = isinstance(model_or_models, (list, tuple))
        self.models: list[Any] = list(model_or_models) if several else [model_or_models]  # type: ignore[arg-type]
        self.ranks = as_ranks(group_or_mesh, dimensions=2)
        # Checked on entry, which raises on every rank.
        self.exchange, self.layout = exchange, layout
        self.gather_outputs, self.check_batches = gather_outputs, check_batches
        self.entered = self.running = False  # running: not paused
        self.sharding: Sharding | None = None  # of the last batch
        self.compared = compared_parameters([])
        self.heads: list[Pipeline] = []  # the forwards that share their batches
        self._patches: list[Patch] = []

    def __deepcopy__(self, _: Any) -> SequenceParallel:
        return self  # a copy of a model is in the same context

    def __enter__(self) -> SequenceParallel:
        if self.entered:
            raise ValueError("this context is entered already; leave it first.")
        self.entered = True
        error: Exception | None = None
        try:
            self.dimensions = dimensions_of(self.ranks, self.exchange)
            check_layout_name(self.layout)
            check_flag(self.gather_outputs, "gather_outputs")
            check_flag(self.check_batches, "check_batches")
            self._prepare()
        except Exception as problem:
            error = problem
        settings = {"models": ", ".join(type(model).__name__ for model in self.models)}
        for name in ("exchange", "layout", "gather_outputs", "check_batches"):
            settings[name] = str(getattr(self, name))
        try:
            require_same(self.ranks, error, settings)
        except Exception:
            self._restore()
            raise
        watch(self)
        self.running = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.sharding is not None and not self.gather_outputs:
            _explain(error, self.sharding)
        self._restore()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which every rank runs patched models on whole batches: to generate, or on batches of its own.

        Gradients of what runs inside are the rank's own.
        """
        before, self.running = self.running, False
        try:
            yield
        finally:
            self.running = before and self.entered

    def shard(self, x: Tensor, *, fill: float = 0) -> Tensor:
        """This rank's rows, (1, rows, ...), of a tensor (B, T, ...) for the batch of the last forward.

        A batch with few tokens is padded, so that every rank has some; `fill` is the value of the padding. Pass -100
        for targets, which leaves the padding out of the loss.

        Raises:
            ValueError: another shape, or no forward yet.
        """
        return self._last().shard(x, fill=fill)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of all ranks, (1, rows, ...) each, as (B, T, ...) in the order of the batch, differentiably.

        Raises:
            ValueError: as in `shard`.
        """
        return self._last().gather(x)

    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks of their parts of a loss, equal on all ranks, with the gradients of one device.

        Raises:
            ValueError: no forward yet.
        """
        return self._last().total(part)

    @property
    def shared_modules(self) -> list[nn.Module]:
        """The modules whose calls share batches, while the context is entered."""
        return [head.module for head in self.heads if not head.gone]

    def cover_heads(self) -> None:
        """Share the calls of forwards that other code has put over a patch's forwards, such as TRL's fused head."""
        for number, head in enumerate(self.heads):
            if not head.gone and not head.in_place:
                self.heads[number] = cover = Cover(head)
                cover.install()
                cover.shard = ShardStage(self, number, cover.module)

    def _last(self) -> Sharding:
        if self.sharding is None:
            raise ValueError("no batch has been shared yet: run a model's forward inside of the context first.")
        return self.sharding

    def _prepare(self) -> None:
        """Patch the models, and put the stage that shards into their pipelines."""
        if not self.models:
            raise ValueError("expected a model, or several; got [].")
        for model in self.models:
            if not isinstance(model, nn.Module):
                patch(model)  # raises, and says what it is
            require_reduction(model, self.ranks)
            if not applied_to(model):
                self._patches.append(patch(model))
            for applied in applied_to(model):
                if applied.shares_batches:
                    raise ValueError(
                        f"this {type(model).__name__} is in another SequenceParallel context. Leave that one first."
                    )
                applied.proof.prove_now()
                require_shardable(model, applied)
                for head in applied.heads:
                    if not head.gone:
                        head.shard = ShardStage(self, len(self.heads), head.module)
                        self.heads.append(head)
        self.cover_heads()
        self.compared = compared_parameters(self.models)

    def _restore(self) -> None:
        self.entered = self.running = False
        unwatch(self)
        for head in self.heads:
            while isinstance(head, Cover):
                head.remove()
                head = head.below
            head.shard = None
        for handle in reversed(self._patches):
            handle.unpatch()
        self.heads, self._patches = [], []
        self.compared, self.sharding = compared_parameters([]), None


def _explain(error: BaseException, sharding: Sharding) -> None:
    """Add a remedy to an error, such as torch's, that names the number of this rank's rows.

    The context can't see heads and losses outside of the given model. They fail in torch, with unlike sizes.
    """
    message, rows = str(error), sharding.rows
    named = {rows, rows - 1} & set(map(int, re.findall(r"\d+", message)))  # without the last row if a loss shifts
    foreign = error.args == (message,) and not isinstance(error, UnsupportedModelError)
    if named and foreign and "gather_outputs" not in message:
        error.args = (
            f"{message}\nInside of SequenceParallel, the outputs of a model are this rank's rows, (1, {rows}, ...) of "
            f"a batch of {tuple(sharding.tokens)} tokens. A head or a loss outside of the given model gets all rows "
            "with SequenceParallel(..., gather_outputs=True). Or pass the whole model with its head, call the model "
            "itself (not a `forward` that was read from it before the context was entered), and shard labels with "
            "`context.shard`.",
        )
