"""Saved tokens, throughput and packing efficiency in the logs of transformers' Trainer."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import Trainer, TrainerCallback

from tritonpack.patches.applied_patch import applied_to
from tritonpack.patches.compact import Saved

# (4,) of training steps: tokens given, tokens computed, the room of packed rows in tokens (else 0), seconds.
Totals = NDArray[np.float64]


class SavedTokensCallback(TrainerCallback):
    """Adds saved tokens and throughput to the logs of a Trainer whose model is patched with `unpad` or
    `share_prefixes`.

        tritonpack.patch(trainer.model, unpad=True)
        trainer.add_callback(tritonpack.SavedTokensCallback(trainer))

    The entries are in `trainer.state.log_history` and in every reporter, whatever the order of the callbacks. Each log
    with a `loss` gets, for the training steps since the one before:

    - `tokens_saved_share`: the share of the tokens given that the model didn't compute, from 0 to 1;
    - `tokens_given_per_second`, padding and copies included, and `tokens_computed_per_second`.

    The last log has all three since `train()` was called, with the prefix `train_`. Tokens are summed over the ranks.
    With `tritonpack.setup`, which adds this callback, the tokens given are the tokens of padded batches of the same
    documents, one batch for each packed row, and logs get `packing_efficiency`, too: the share of the rows that holds
    tokens.

    Every call of the model in a training step counts, also generation and scoring without gradients (GRPO). Evaluation
    and saving count neither as tokens nor as time; loading data counts as time. Logs of steps in which the patched
    model didn't run get nothing.

    Args:
        trainer: the trainer that gets this callback.

    Raises:
        ValueError: no Trainer, or its model isn't patched with `unpad` or `share_prefixes`; also when training begins.
    """

    def __init__(self, trainer: Trainer) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(
                f"expected a transformers.Trainer; got a {type(trainer).__name__}. Make the trainer first, then call "
                "trainer.add_callback(tritonpack.SavedTokensCallback(trainer))."
            )
        self._trainer = trainer
        self._start()

    def _start(self) -> None:
        self._saved = self._find_saved()
        self._since_log, self._since_start = np.zeros(4), np.zeros(4)
        self._before = self._counted()
        self._clock = perf_counter()

    def _find_saved(self) -> list[Saved]:
        return _saved_of(self._trainer.model)

    def _counted(self) -> Totals:
        """The tokens of all calls since the model was patched."""
        each = [(one.tokens_given, one.tokens_computed, getattr(one, "room", 0), 0) for one in self._saved]
        return np.sum(each, axis=0, dtype=np.float64)

    def _add_time(self) -> None:
        now = perf_counter()
        self._since_log[3] += now - self._clock
        self._clock = now

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
        self._since_log += self._counted() - self._before

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._clock = perf_counter()

    on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add to the logs of training. Trainer has read the loss from the device, so all steps have ended there."""
        last = "train_loss" in logs
        if not last and "loss" not in logs:
            return
        self._add_time()
        tokens = torch.tensor(self._since_log[:3].astype(np.int64), device=args.device)
        self._since_log[:3] = self._trainer.accelerator.reduce(tokens, reduction="sum").tolist()
        self._since_start += self._since_log
        figures = _figures(self._since_start, "train_") if last else _figures(self._since_log)
        self._since_log[:] = 0
        logs.update(figures)
        state.log_history[-1].update(figures)  # Trainer has put a copy of the logs there


def _figures(totals: Totals, prefix: str = "") -> dict[str, float]:
    """The entries of a log; none if the patched model ran on no token."""
    given, computed, room, seconds = totals.tolist()
    if not given or not seconds:
        return {}
    figures = {
        "tokens_saved_share": 1 - computed / given,
        "tokens_given_per_second": given / seconds,
        "tokens_computed_per_second": computed / seconds,
        **({"packing_efficiency": computed / room} if room else {}),
    }
    return {f"{prefix}{name}": value for name, value in figures.items()}


def _saved_of(model: nn.Module) -> list[Saved]:
    """The counts of tokens of a patched model."""
    applied = applied_to(model)
    saved = [patch.compaction.saved for patch in applied if patch.compaction is not None]
    if not saved:
        reason = "patched without unpad and share_prefixes, so it saves no tokens" if applied else "not patched"
        raise ValueError(
            f"the trainer's {type(model).__name__} is {reason}. First call tritonpack.patch(trainer.model, unpad=True) "
            "or tritonpack.patch(trainer.model, share_prefixes=True). If model_init makes the model, patch it there."
        )
    return saved
