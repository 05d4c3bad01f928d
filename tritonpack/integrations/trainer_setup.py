"""setup: packed training with transformers' Trainer and TRL's SFTTrainer, in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from tritonpack.backends import Backend
from tritonpack.checks import check_choice
from tritonpack.integrations.trainer import SavedTokensCallback
from tritonpack.integrations.trainer_checks import check_trainer, check_training, labels_of
from tritonpack.packing import PackedDataLoader, dataloader
from tritonpack.packing.collator import IGNORED_LABEL, TAKEN
from tritonpack.packing.collator import Objective as LabelObjective
from tritonpack.packing.loader import _PASSED_ON, Reader, fetch
from tritonpack.packing.samplers.epochs import describe_changes
from tritonpack.patches import Patch, patch
from tritonpack.patches.compact import Saved
from tritonpack.removed import OPTIONS, refuse_attributes, refuse_removed

STATE = "tritonpack"  # the key of the loader's state in Trainer's stateful_callbacks, in trainer_state.json
_LOADING = {  # options of a DataLoader, and the TrainingArguments that have them
    "num_workers": "dataloader_num_workers",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "in_order": "dataloader_in_order",
    "multiprocessing_context": "dataloader_multiprocessing_context",
}
_FROM_ARGUMENTS = {
    **_LOADING,
    "pin_memory": "dataloader_pin_memory",
    "seed": "data_seed",
    "shuffle": "train_sampling_strategy",
    "epochs": "num_train_epochs",
}
_MADE_HERE = ("num_replicas", "rank", "group", "shard", "worker_init_fn")
_TAKEN = (
    "labels", "attention", "backend", "unpad", "lengths", "documents", "collate_fn", "objective", "tail", "overlong",
    "per_token", "drop_columns", "max_document_length", "pad_to_multiple_of", "pad_token_id",
)  # fmt: skip
_ACCUMULATED = "gradient_accumulation_steps"
_ANEW = "pass ignore_data_skip=True in the TrainingArguments to begin the epoch anew"


@refuse_attributes
class TrainerSetup(AbstractContextManager["TrainerSetup"]):
    """The handle of a trainer that trains on packed rows. As a context manager it undoes the set-up on leaving.

    `print(handle)` shows the patch, the plan of the first epoch, and what of the trainer's settings has no effect.

    Attributes:
        trainer: the trainer that was given to `setup`.
        patch: the handle of the patched model.
    """

    def __init__(self, trainer: Trainer, tokens: int, patching: Mapping[str, Any], packing: Mapping[str, Any]) -> None:
        self.trainer = trainer
        self._tokens, self._patching, self._packing = tokens, dict(patching), dict(packing)
        self._documents: Reader | None = None  # of the latest loader
        self._loader = self._load(epochs=1)
        self._callback = _PackedTraining(self)
        self._patch(trainer.model)
        trainer.add_callback(self._callback)
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (_PackedTrainer, kind), {"packed_setup": self})

    def _patch(self, model: nn.Module) -> None:
        try:
            self.patch: Patch = patch(model, **self._patching)
        except ValueError as error:
            if not self._patching["unpad"] or "unpad" not in str(error):
                raise
            raise type(error)(f"{error} Here: pass unpad=False to setup. Evaluation then computes padding.") from error

    def undo(self) -> None:
        """Unpatch the model, and give the trainer its own loader back. A second call does nothing."""
        if getattr(self.trainer, "packed_setup", None) is self:
            self.trainer.__class__ = type(self.trainer).__bases__[1]
            self.trainer.remove_callback(self._callback)
        self.patch.unpatch()

    def _load(self, epochs: int) -> PackedDataLoader:
        trainer, args = self.trainer, self.trainer.args
        packing = dict(self._packing)
        packing["labels"] = self._labels = labels_of(trainer, packing.get("labels"))
        own_form = packing.get("documents") is not None or packing.get("collate_fn") is not None
        check_training(trainer, self._labels, own_form)
        if packing.get("collate_fn") is not None:  # which makes labels of its own
            packing.pop("labels")
        dataset = trainer.train_dataset
        if self._documents is not None and self._documents.dataset is dataset:
            packing["lengths"] = self._documents
        packing |= {
            "drop_columns": (*packing.get("drop_columns", ()), *(() if own_form else self._unused_columns())),
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
        }
        # Inside of SequenceParallel, which then counts the ranks of a group as one process.
        sharing = getattr(trainer.accelerator.state, "sharing_group", None)
        place = {"num_replicas": trainer.accelerator.num_processes, "rank": trainer.accelerator.process_index}
        loader = dataloader(
            dataset, self._tokens, **packing, **(place if sharing is None else {"group": sharing}), shard=True,
            epochs=epochs,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=place["rank"]),
            **{option: getattr(args, name) for option, name in _LOADING.items() if hasattr(args, name)},
        )  # fmt: skip
        self._documents = loader.documents
        return loader

    def _unused_columns(self) -> tuple[str, ...]:
        """The columns that neither the model nor the collator takes, with `remove_unused_columns` (the default)."""
        trainer = self.trainer
        if not trainer.args.remove_unused_columns or not len(trainer.train_dataset):
            return ()
        trainer._set_signature_columns_if_needed()
        named = (*self._packing.get("per_token", ()), *self._packing.get("drop_columns", ()))
        used = {*trainer._signature_columns, *TAKEN, *named}
        (first,) = fetch(trainer.train_dataset, [0])
        return tuple(name for name in first if name not in used) if isinstance(first, Mapping) else ()

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        args = self.trainer.args
        return (
            f"{self.patch.report}\n{self._loader}\n"
            f"  per_device_train_batch_size={args.per_device_train_batch_size} has no effect: a batch is one row of at "
            f"most {self._tokens:,} tokens, and an optimizer step {args.gradient_accumulation_steps} of them per rank"
        )


class _PackedTrainer(Trainer):
    """Changed methods of a Trainer: the class stands before the trainer's own class while the trainer is set up."""

    packed_setup: TrainerSetup

    def get_train_dataloader(self) -> PackedDataLoader:
        """The loader of packed rows."""
        setup, args, epochs = self.packed_setup, self.args, math.ceil(self.args.num_train_epochs)
        if args.max_steps > 0:
            per_epoch = -(-len(setup._load(epochs=1)) // args.gradient_accumulation_steps)
            epochs = -(-args.max_steps // per_epoch)
        setup._loader = setup._load(epochs)
        return setup._loader

    def get_total_train_batch_size(self, args: Any) -> int:
        """The mean number of documents per optimizer step, over all ranks, for Trainer's logs."""
        loader = self.packed_setup._loader
        steps = -(-len(loader) // args.gradient_accumulation_steps)
        return max(1, round(len(loader.dataset) / steps))  # type: ignore[arg-type]

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model with `model_init`, and patch it."""
        model = super().call_model_init(trial)
        self.packed_setup.patch.unpatch()
        self.packed_setup._patch(model)
        return model

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The loss of one row of an optimizer step.

        Losses of causal models are sums, divided by the targets of the step. Other losses of transformers are means
        over the targets of the row, whatever `num_items_in_batch` is, so this weighs them by the row's targets.
        """
        own = super().compute_loss
        is_sum = self.packed_setup._labels == "causal" or self.compute_loss_func or self.label_smoother
        if is_sum or num_items_in_batch is None or own.__func__ is not Trainer.compute_loss:
            return own(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        share = inputs["labels"].ne(IGNORED_LABEL).sum() / num_items_in_batch
        loss, outputs = own(model, inputs, return_outputs=True)
        loss = loss * share * self.accelerator.num_processes  # DDP and FSDP average over the ranks
        return (loss, outputs) if return_outputs else loss


def setup(
    trainer: Trainer, tokens: int, *, labels: LabelObjective | None = None,
    attention: Literal["tritonpack", "sdpa", "eager"] = "tritonpack", backend: Backend = "auto", unpad: bool = True,
    **options: Any,
) -> TrainerSetup:  # fmt: skip
    """Let a Trainer train on packed rows of at most `tokens` tokens per rank.

        handle = tritonpack.setup(trainer, tokens=32768)
        trainer.train()

    It patches the model, and replaces the loader of the training alone: evaluation and prediction keep their padded
    batches, in which the model computes no padding. The trainer's epochs, steps, seeds, workers, accumulation and
    checkpoints hold for packed rows, too. Rows have different numbers of documents, so `per_device_train_batch_size`
    has no effect. Logs get the saved tokens, the throughput and the packing efficiency, see `SavedTokensCallback`.

    With `remove_unused_columns=True` columns go that neither the model nor PackingCollator takes; `completion_mask` and
    `assistant_masks` stay.

    Args:
        trainer: a transformers.Trainer or TRL's SFTTrainer, with an indexed train_dataset of tokenized documents.
        tokens: the tokens of a row, from 1 to 2**30.
        labels: what a label belongs to, the `objective` of PackingCollator, for losses of one's own. None finds it by
            the model's loss.
        attention, backend, unpad: see `patch`. They replace an earlier patch of the model.
        options: `lengths`, `documents`, `collate_fn`, `objective`, `tail`, `overlong`, `per_token`,
            `drop_columns`, `max_document_length`, `pad_to_multiple_of` and `pad_token_id`, see `dataloader`. With
            `documents` or `collate_fn` no column is removed. Evaluation keeps the trainer's own collator.

    Returns:
        A handle, which `print` shows. `undo()` restores the trainer and its model.

    Raises:
        UnsupportedModelError: (a ValueError) see `patch`.
        ValueError: no Trainer, or one that was set up already or makes training batches in a way of its own; settings
            that contradict packed rows; what `dataloader` refuses. When training resumes: a checkpoint that was saved
            with other lengths or settings.
    """
    check_trainer(trainer)
    for name in options:
        if name in _FROM_ARGUMENTS:
            raise ValueError(f"{name} can't be passed; set {_FROM_ARGUMENTS[name]} in the TrainingArguments.")
        if name in _MADE_HERE:
            raise ValueError(f"{name} can't be passed, because the trainer decides it.")
    if unknown := sorted(options.keys() - {*_TAKEN, *_PASSED_ON}):
        refuse_removed([name for name in unknown if name in OPTIONS], "setup()")
        raise ValueError(f"setup has no option {unknown[0]!r}; it takes {', '.join(_TAKEN)}.")
    if labels is not None:
        check_choice(labels, get_args(LabelObjective), "labels")
    patching = {"attention": attention, "backend": backend, "unpad": unpad}
    return TrainerSetup(trainer, tokens, patching, {"labels": labels, **options})


class _Rows(Saved):
    """The tokens of packed rows and of padded batches of the same documents; `room`: the tokens that fit in."""

    room = 0


class _PackedTraining(SavedTokensCallback):
    """Counts the rows of a training, writes their state into its checkpoints, and resumes from it."""

    def __init__(self, handle: TrainerSetup) -> None:
        self._handle, self._rows = handle, _Rows()
        self._batches = 0  # batches of the epoch that were trained on
        self._resumed: tuple[int, int] | None = None  # the first epoch, and the batches of it that Trainer skips
        super().__init__(handle.trainer)

    def _find_saved(self) -> list[Saved]:
        return [self._rows]

    def on_train_begin(self, args: Any, state: Any, *others: Any, **__: Any) -> None:
        resumes = state.global_step > 0 and not args.ignore_data_skip
        self._resumed = self._find_place(args, state) if resumes else None
        super().on_train_begin()

    def _find_place(self, args: Any, state: Any) -> tuple[int, int]:
        """The epoch of the checkpoint, and the batches of it that were trained on.

        Raises:
            ValueError: a checkpoint without a plan, with another one, or with another accumulation of gradients.
        """
        saved = state.stateful_callbacks.get(STATE)
        if saved is None:
            raise ValueError(
                "the checkpoint was saved without tritonpack.setup, so its batches held other documents. Pass "
                "ignore_data_skip=True in the TrainingArguments to begin its epoch anew with packed rows."
            )
        loader, accumulated = self._handle._loader, args.gradient_accumulation_steps
        rows, steps = loader.rows, len(loader)
        try:
            made, done, was = rows.find_place(saved["loader"])
        except ValueError as error:
            raise ValueError(f"{error} Or {_ANEW}.") from error
        done, changes = done // rows.num_replicas, ""
        found = (made.epoch + 1, 0) if done == steps else (made.epoch, done)
        epoch, updates = divmod(state.global_step, -(-steps // accumulated))  # where Trainer continues
        if made.before:
            was, now = ({**settings, "least_steps": 0} for settings in (was, made.settings))
            changes = describe_changes(was, now) or f"num_train_epochs or max_steps give each epoch {steps} steps"
        elif saved[_ACCUMULATED] != accumulated:
            changes = f"{_ACCUMULATED} was {saved[_ACCUMULATED]} and is {accumulated}"
        elif found != (epoch, updates * accumulated):
            changes = "a callback ended it"
        if changes:
            raise ValueError(
                f"the checkpoint can't be resumed, because the rest of its epoch {made.epoch} has other batches "
                f"since: {changes}. Restore that, or {_ANEW}."
            )
        return found

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._batches = 0
        if self._resumed is not None:
            # Trainer skips batches with a loader of its own, whose epoch its older versions don't set.
            epoch, self._batches = self._resumed
            self._handle._loader.rows.set_epoch(epoch)
            self._resumed = None

    def on_step_end(self, args: Any, state: Any, *others: Any, **__: Any) -> None:
        loader, longest = self._handle._loader, self._handle._packing.get("max_document_length")
        plan, lengths = loader.rows.plan, loader.rows.lengths
        accumulated = args.gradient_accumulation_steps
        end = min(self._batches + accumulated, len(loader))
        for batch in range(self._batches, end):
            row = plan.row(batch, loader.rank)
            self._rows.tokens_given += loader.documents.padded_tokens(row, longest)
            self._rows.tokens_computed += int(lengths[row].sum())
            self._rows.room += plan.capacity
        self._batches = end
        state.stateful_callbacks[STATE] = {"loader": loader.state_dict(end), _ACCUMULATED: accumulated}
        super().on_step_end()
