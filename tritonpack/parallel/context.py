"""SequenceParallel: the context in which the ranks of a group share every batch of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor, nn

from tritonpack.checks import check_choice, check_flag
from tritonpack.parallel.attention import check_stride
from tritonpack.parallel.consistency import ComparedParameters, require_same_settings
from tritonpack.parallel.context_state import SETTINGS, ContextState
from tritonpack.parallel.dimensions import Exchange, Exchanges, dimensions_of, ranks_of
from tritonpack.parallel.forward import ShardedForward
from tritonpack.parallel.layouts import LayoutName
from tritonpack.parallel.shard_and_gather import GradReduce, Sharding
from tritonpack.parallel.trainers.watch import unwatch, watch
from tritonpack.parallel.validate import (
    find_base,
    key_heads,
    require_reduction,
    require_shardable,
    shared_modules,
)
from tritonpack.patches import patch
from tritonpack.patches.applied_patch import applied_to
from tritonpack.patches.patching import Patch

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike

# Name of axolotl -> exchange and layout.
SCHEMES: dict[str, tuple[Exchange, LayoutName]] = {
    "varlen_llama3": ("all_gather", "contiguous"),
    "batch_ring": ("ring", "contiguous"),
    "batch_zigzag": ("ring", "zigzag"),
    "batch_stripe": ("ring", "stripe"),
}


class SequenceParallel:
    """A context in which the ranks of a group share every batch of a model, with the loss and gradients of one device.

    Every rank passes the same full batch, packed or padded, of any length:

    ```python
    with tritonpack.SequenceParallel(model, mesh["sp"]):
        loss = model(**batch).loss  # the loss of one device, on every rank
        loss.backward()             # DDP or FSDP over (dp, sp) averages to the gradients of one device
    ```

    Each rank runs the model on its own rows of tokens, embeddings, positions and labels. Labels are shifted before they
    are sharded. Attention gets the keys and values of other ranks. Losses are summed over ranks and divided by the
    number of all targets, or by `num_items_in_batch`. Logits and hidden states are this rank's rows, (1, rows, ...),
    unless `gather_outputs` is set. `logits_to_keep` means tokens of the whole batch. `inputs_embeds` get gradients for
    this rank's rows. A base model that is called without its head shares its batch, too.

    The objective is the mean over ranks of their losses. So a loss of your own that every rank computes alike from
    gathered outputs, such as GRPO's or DPO's, needs no change. If each rank computes a part of a loss, multiply it by
    the number of ranks, or sum it with `total`.

    Trainers of transformers and TRL may be built before the context or inside of it. While they train, evaluate or
    predict in it, their own loaders give the ranks of a group one batch, and they count the group as one process.

    Models that aren't patched are patched on entry. Leaving restores them, also after an exception. In nested contexts
    the innermost one counts.

    Args:
        model_or_models: a transformers model, a module that holds one (DDP, PEFT), or several, such as policy and
            reference.
        group_or_mesh: the ranks that share a batch: a process group, a DeviceMesh of one or two dimensions, or None for
            the whole world.
        exchange: how keys and values travel, as in `tritonpack.parallel.attend`: "auto", "all_gather", "group_cast",
            "ring" or "ulysses"; for a mesh of two dimensions a pair with "ulysses" for one of them and another name for
            the other, such as ("group_cast", "ulysses"). axolotl's names stand for an exchange and a layout:
            "varlen_llama3" (all_gather, contiguous), "batch_ring" (ring, contiguous), "batch_zigzag" and "batch_stripe"
            (ring).
        layout: which rows a rank owns, as in `tritonpack.parallel.make_layout`: "contiguous", "zigzag", "stripe",
            "balanced" or "documents"; these two wait for the device once per forward. None means the layout of
            axolotl's name; "documents" with "auto" and "group_cast"; "balanced" with the others. With a pair of
            exchanges, the ranks that divide heads own rows together, and each of them gets a run of these.
        heads_k_stride: key heads per step of "auto", "all_gather" and "group_cast", as in `attend`; others refuse it.
        gather_outputs: return the outputs of the whole batch, (B, T, ...), on every rank, differentiably.
        grad_reduce: how gradients are reduced over the ranks afterwards: "mean", as DDP and FSDP do, or "sum".
        check_batches: compare batches between ranks before each forward, which waits for the device. Without it,
            batches that differ may give wrong numbers, or ranks that wait until the time limit of the group.

    Raises:
        ValueError: on every rank: settings that are unknown or differ between ranks, and a DDP or FSDP module that
            doesn't reduce gradients over these ranks. In a forward pass: batches that differ, a batch without tokens, a
            cache, dropout in attention, arguments that can't be sharded, parameters that differ between ranks.
        UnsupportedModelError: (a ValueError) a model that can't be patched, or needs more of other ranks than
            layers exchange: dense masks, a loss computed otherwise than by its loss function.
    """

    def __init__(
        self,
        model_or_models: nn.Module | Sequence[nn.Module],
        group_or_mesh: GroupLike = None,
        *,
        exchange: str | tuple[str, str] = "auto",
        layout: str | None = None,
        heads_k_stride: int | None = None,
        gather_outputs: bool = False,
        grad_reduce: GradReduce = "mean",
        check_batches: bool = True,
    ) -> None:
        several = isinstance(model_or_models, (list, tuple))
        self.models: list[Any] = list(model_or_models) if several else [model_or_models]  # type: ignore[arg-type]
        given: Any = (exchange, layout, heads_k_stride, gather_outputs, grad_reduce, check_batches)
        self.state = ContextState(ranks_of(group_or_mesh), *given)  # checked on entry, which raises on every rank
        self._forwards: list[ShardedForward] = []
        self._patches: list[Patch] = []

    def __enter__(self) -> SequenceParallel:
        state = self.state
        if state.entered:
            raise ValueError("this context is entered already; make another one to nest them.")
        state.entered = True
        error: Exception | None = None
        try:
            state.exchange, state.layout = _scheme(state.exchange, state.layout)
            dimensions_of(state.ranks, state.exchange)
            check_choice(state.grad_reduce, get_args(GradReduce), "grad_reduce")
            check_flag(state.gather_outputs, "gather_outputs")
            check_flag(state.check_batches, "check_batches")
            self._prepare()
        except Exception as problem:
            error = problem
        settings = {name: getattr(state, name) for name in SETTINGS}
        settings["models"] = [type(model).__name__ for model in self.models]
        settings |= _configured(self._shared_modules)
        try:
            require_same_settings(state.ranks, error, settings)
        except Exception:
            self._restore()
            raise
        watch(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.state.sharding is not None and not self.state.gather_outputs:
            _add_remedy(error, self.state.sharding)
        self._restore()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which every rank runs patched models on whole batches: to generate, or on batches of its own.

        Gradients of what runs inside are the rank's own.
        """
        before, self.state.paused = self.state.paused, True
        try:
            yield
        finally:
            self.state.paused = before

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

    def __repr__(self) -> str:
        state, names = self.state, ", ".join(type(model).__name__ for model in self.models)
        return (
            f"SequenceParallel({names}: rank {state.ranks.rank} of {state.ranks.size}, exchange={state.exchange!r}, "
            f"layout={state.layout!r})"
        )

    def _cover_heads(self) -> None:
        """Share the calls of heads that other code has put into a model since this context was entered.

        TRL's trainers put a fused head over the forward that shares batches. It would get the rows of the whole batch.
        """
        latest = {id(forward.module): forward for forward in self._forwards}
        self._forwards += [forward.over_its_cover() for forward in latest.values() if forward.is_covered]

    def _explain(self, error: Exception, who: str) -> None:
        """Add to an error of code that reads a model's logits how it gets those of the whole batch.

        Args:
            error: what was raised after a model's forward.
            who: the name of the code.
        """
        known = type(error) in (ValueError, IndexError, RuntimeError) and error.args == (str(error),)
        if known and not self.state.gather_outputs and not re.search("sequence.?parallel", str(error), re.IGNORECASE):
            error.args = (
                f"{error}\nInside of SequenceParallel a model's logits are this rank's rows. If {who} computes its "
                "loss from logits, it gets those of the whole batch with SequenceParallel(..., gather_outputs=True).",
            )

    @property
    def _shared_modules(self) -> list[nn.Module]:
        """The modules whose calls share batches, while the context is entered."""
        return [forward.module for forward in self._forwards if not forward.gone]

    def _last(self) -> Sharding:
        if self.state.sharding is None:
            raise ValueError("no batch has been shared yet: run a model's forward inside of the context first.")
        return self.state.sharding

    def _prepare(self) -> None:
        """Patch the models and replace their forwards."""
        if not self.models:
            raise ValueError("expected a model, or several; got [].")
        for model in self.models:
            if not isinstance(model, nn.Module):
                patch(model)  # raises, and says what it is
            require_reduction(model, self.state.ranks)
            base = find_base(model)
            if base is None:
                self._patches.append(patch(model))
            for applied in applied_to(model):
                applied.proof.settle()
            require_shardable(model, self._patches[-1].report if base is None else base.report)
            check_stride(self.state.heads_k_stride, self.state.exchange, key_heads(model))
            for module in shared_modules(model):  # one by one, so that an error leaves none behind
                self._forwards.append(ShardedForward(module, self.state))
        self.state.compared = ComparedParameters(self.models)

    def _restore(self) -> None:
        self.state.entered = False
        unwatch(self)
        for forward in reversed(self._forwards):
            forward.remove()
        for handle in reversed(self._patches):
            handle.unpatch()
        self._forwards, self._patches = [], []
        self.state.compared = self.state.sharding = None


def _configured(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """The numbers and words in the configurations of models, without paths, which may differ from rank to rank."""
    plain = (bool, int, float, str)
    return {
        f"config.{name} of model {number}": value
        for number, module in enumerate(modules)
        for name, value in module.config.get_text_config().to_dict().items()  # type: ignore[operator, union-attr]
        if isinstance(value, plain) and not name.startswith("_") and "path" not in name and "version" not in name
    }


def _scheme(exchange: Any, layout: Any) -> tuple[Exchanges, LayoutName]:
    """The exchange and the layout of the given names; raises for unknown names."""
    pair = isinstance(exchange, (tuple, list))
    if not pair:
        check_choice(exchange, (*get_args(Exchange), *SCHEMES), "exchange")
    if layout is not None:
        check_choice(layout, get_args(LayoutName), "layout")
    if pair or exchange not in SCHEMES:
        few_keys_help = {"auto", "group_cast"} & set(exchange if pair else [exchange])
        return exchange, layout or ("documents" if few_keys_help else "balanced")
    implied = SCHEMES[exchange]
    if layout not in (None, implied[1]):
        raise ValueError(
            f"exchange={exchange!r} has the layout {implied[1]!r}; got layout={layout!r}. Leave the layout out, or "
            f"pass exchange={implied[0]!r} with it."
        )
    return implied


def _add_remedy(error: BaseException, sharding: Sharding) -> None:
    """Add to an error that names the rows of this rank and of the batch how a head or a loss gets all rows.

    The context can't see heads and losses outside of the given model. They fail in torch, with unlike sizes.
    """
    message, rows, (batch, length) = str(error), sharding.rows, sharding.tokens
    named = set(map(int, re.findall(r"\d+", message)))
    own = {rows, rows - 1}  # without the last row if a loss has shifted them
    whole = {length, length - 1, batch * length, batch * (length - 1)}
    if error.args != (message,) or "gather_outputs" in message or not (own & named and whole & named):
        return
    error.args = (
        f"{message}\nInside of SequenceParallel, the outputs of a model are this rank's rows, (1, {rows}, ...) of a "
        f"batch of {tuple(sharding.tokens)} tokens. A head or a loss outside of the given model gets all rows with "
        "SequenceParallel(..., gather_outputs=True). Or pass the whole model with its head, call the model itself (not "
        "a `forward` that was read from it before the context was entered), and shard labels with `context.shard`.",
    )
