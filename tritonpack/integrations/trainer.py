"""Saved tokens, throughput and packing efficiency in the logs of transformers' Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from tritonpack.patches.applied_patch import applied_to
from tritonpack.patches.compact import Saved


@dataclass
class PackedRows(Saved):
    """The tokens of packed rows. `tokens_given` counts the tokens of padded batches of the same documents.

    Attributes:
        room: the tokens that fit into these rows.
    """

    room: int = 0


class Throughput(NamedTuple):
    """Tokens of training steps, the seconds that these steps took, and the room of packed rows."""

    given: int = 0
    computed: int = 0
    room: int = 0
    seconds: float = 0.0

    def plus(self, given: int = 0, computed: int = 0, room: int = 0, seconds: float = 0.0) -> Throughput:
        return Throughput(self.given + given, self.computed + computed, self.room + room, self.seconds + seconds)

    def figures(self, prefix: str = "") -> dict[str, float]:
        """The entries of a log; none if the patched model ran on no token."""
        if not self.given or not self.seconds:
            return {}
        figures = {
            f"{prefix}tokens_saved_share": 1 - self.computed / self.given,
            f"{prefix}tokens_given_per_second": self.given / self.seconds,
            f"{prefix}tokens_computed_per_second": self.computed / self.seconds,
        }
        return figures | ({f"{prefix}packing_efficiency": self.computed / self.room} if self.room else {})


class SavedTokensCallback(TrainerCallback):
    """Adds saved tokens and throughput to the logs of a Trainer whose model is patched with `unpad` or
    `share_prefixes`.

        tritonpack.patch(trainer.model, unpad=True)
        trainer.add_callback(tritonpack.SavedTokensCallback(trainer))

    The entries are in `trainer.state.log_history` and in every reporter, whatever the order of the callbacks. Each log
    with a `loss` gets, for the training steps since the one before:

    - `tokens_saved_share`: the share of the tokens given that the model didn't compute, from 0 to 1;
    - `tokens_given_per_second`, padding and copies included, and `tokens_computed_per_second`;
    - `train_tokens_saved_share`: the share since `train()` was called.

    The last log has all three since `train()` was called, with the prefix `train_`. Tokens are summed over the ranks.
    With `tritonpack.setup`, which adds this callback, the tokens given are those of padded batches of the same
    documents, one batch for each packed row. Logs then get two entries, and the last log gets both with the prefix
    `train_`: `tokens_saved_share` and `packing_efficiency`, the share of the rows that holds tokens. The handle's
    `figures` have all entries.

    Every call of the model in a training step counts, also generation and scoring without gradients (GRPO). Evaluation
    and saving count neither as tokens nor as time; loading data counts as time. Logs of steps in which the patched
    model didn't run get nothing.

    Args:
        trainer: the trainer that gets this callback.

    Raises:
        ValueError: no Trainer, or its model isn't patched with `unpad` or `share_prefixes`; also when training begins.
    """

    _logged: tuple[str, ...] | None = None  # the entries of logs, without prefix; None for all

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(
                f"expected a transformers.Trainer; got a {type(trainer).__name__}. Make the trainer first, then call "
                "trainer.add_callback(tritonpack.SavedTokensCallback(trainer))."
            )
        self._trainer = trainer
        self._start()

    def _find_counts(self) -> list[Saved]:
        return _counts_of(self._trainer.model)

    def _start(self) -> None:
        self._counts = self._find_counts()
        self._since_log, self._since_start = Throughput(), Throughput()
        self.figures: dict[str, float] = {}  # of the latest log, and since `train()` was called
        self._before = self._counted()
        self._clock = perf_counter()

    def _counted(self) -> tuple[int, int, int]:
        """Tokens given and computed since the model was patched, and the room of packed rows."""
        return (
            sum(saved.tokens_given for saved in self._counts),
            sum(saved.tokens_computed for saved in self._counts),
            sum(saved.room for saved in self._counts if isinstance(saved, PackedRows)),
        )

    def _add_time(self) -> None:
        now = perf_counter()
        self._since_log, self._clock = self._since_log.plus(seconds=now - self._clock), now

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Count from here, and go before the reporters, which write a log as they get it."""
        callbacks = self._trainer.callback_handler.callbacks
        if self not in callbacks:
            raise ValueError(
                "this callback was made for another trainer; call "
                "trainer.add_callback(tritonpack.SavedTokensCallback(trainer)) with the same trainer twice."
            )
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._add_time()
        self._before = self._counted()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._add_time()
        counts = [now - before for now, before in zip(self._counted(), self._before, strict=True)]
        self._since_log = self._since_log.plus(*counts)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._clock = perf_counter()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add to the logs of training. Trainer has read the loss from the device, so all steps have ended there."""
        last = "train_loss" in logs
        if not last and "loss" not in logs:
            return
        self._add_time()
        totals = torch.tensor(self._since_log[:3], device=args.device)
        given, computed, room = self._trainer.accelerator.reduce(totals, reduction="sum").tolist()
        window, self._since_log = Throughput(given, computed, room, self._since_log.seconds), Throughput()
        self._since_start = self._since_start.plus(*window)
        overall = self._since_start.figures("train_")
        share = {name: overall[name] for name in overall if name.endswith(("share", "efficiency"))}
        self.figures |= window.figures() | overall
        figures = overall if last else window.figures() | share
        if self._logged is not None:
            wanted = [f"{'train_' if last else ''}{name}" for name in self._logged]
            figures = {name: figures[name] for name in wanted if name in figures}
        logs.update(figures)
        state.log_history[-1].update(figures)  # Trainer has put a copy of the logs there


def _counts_of(model: nn.Module) -> list[Saved]:
    """The counts of tokens of a patched model."""
    applied = applied_to(model)
    counts = [patch.compaction.saved for patch in applied if patch.compaction is not None]
    if not counts:
        reason = "patched without unpad and share_prefixes, so it saves no tokens" if applied else "not patched"
        raise ValueError(
            f"the trainer's {type(model).__name__} is {reason}. First call tritonpack.patch(trainer.model, unpad=True) "
            "or tritonpack.patch(trainer.model, share_prefixes=True). If model_init makes the model, patch it there."
        )
    return counts
