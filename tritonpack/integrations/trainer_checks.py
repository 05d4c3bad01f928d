"""The checks of `setup` for a Trainer, with remedies, and the kind of labels of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

from tritonpack.integrations.trainer import SavedTokensCallback
from tritonpack.packing import PackingCollator
from tritonpack.packing.loader import fetch

# transformers' name for the loss of a model -> what its labels belong to.
LABELS: dict[str | None, str] = {
    "ForCausalLM": "causal",
    "ForConditionalGeneration": "causal",  # of images and text; encoders with decoders are told apart before
    "ForMaskedLM": "tokens",
    "ForTokenClassification": "tokens",
}
_PADDED = "tritonpack.patch(trainer.model, unpad=True) or share_prefixes=True"


def labels_of(trainer: Trainer, asked: str | None) -> str:
    """Return the kind of labels of the trainer's model, as PackingCollator's `objective` names it.

    Args:
        asked: what the user says; None finds it by the model's loss.

    Raises:
        ValueError: the model's loss doesn't tell, or takes other labels than `asked`; the model gives one result for
            each row.
    """
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model  # PEFT's
    loss, name = getattr(model, "loss_type", None), type(model).__name__
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    known = "tokens" if is_encoder_decoder else LABELS.get(loss)
    if loss == "ForSequenceClassification" and not is_encoder_decoder:
        raise ValueError(
            f"{name} gives one result for each row, so its documents can't share rows. Call "
            "tritonpack.patch(trainer.model, unpad=True) in place of setup: it leaves out the padding of the batches."
        )
    if asked is not None and trainer.compute_loss_func is None and known not in (None, asked):
        raise ValueError(
            f"the loss of {name} takes labels={known!r}; got labels={asked!r}. Leave it out, or pass a "
            "compute_loss_func for such labels to the trainer."
        )
    if asked is None and known is None:
        raise ValueError(
            f"the loss of {name} doesn't tell what its labels belong to. Pass labels='causal' (the next token) or "
            "'tokens' (the token itself)."
        )
    return asked or known  # type: ignore[return-value]


def check_trainer(trainer: Any) -> None:
    """ValueError for a trainer that makes its training batches in a way of its own."""
    if not isinstance(trainer, Trainer):
        raise ValueError(
            f"expected a transformers.Trainer; got a {type(trainer).__name__}. For a loop of your own use "
            "tritonpack.patch and tritonpack.dataloader."
        )
    if hasattr(trainer, "packed_setup"):
        raise ValueError("this trainer is set up already; call undo() of its handle first.")
    for name in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(type(trainer), name, None) is not getattr(Trainer, name, None) or name in vars(trainer):
            raise ValueError(
                f"{type(trainer).__name__} has a {name} of its own, which setup would replace. To leave out the "
                f"padding of its batches use {_PADDED}."
            )
    if any(isinstance(callback, SavedTokensCallback) for callback in trainer.callback_handler.callbacks):
        raise ValueError(
            "the trainer has a SavedTokensCallback, and setup adds one. Remove it first: "
            "trainer.remove_callback(tritonpack.SavedTokensCallback)."
        )


def check_training(trainer: Trainer, labels: str, own_form: bool = False) -> None:
    """ValueError for settings of a training that contradict packed rows.

    Args:
        labels: what a label belongs to.
        own_form: examples may have any form, because a function makes documents or batches of them.
    """
    args, dataset, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    if dataset is None:
        raise ValueError("the trainer has no train_dataset to pack. To evaluate alone use tritonpack.patch.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            "the train_dataset is iterable, and the plan of an epoch needs the lengths of all documents. Use a dataset "
            "that is indexed, or pack the stream itself: tritonpack.pack_stream."
        )
    first = fetch(dataset, [0])[0] if len(dataset) else {"input_ids": []}
    trainer._set_signature_columns_if_needed()
    pairs = [name for name in trainer._signature_columns if "chosen" in name or "rejected" in name]
    if own_form and pairs:
        raise ValueError(
            f"{type(trainer).__name__} computes its loss from padded batches of the columns {', '.join(pairs)}, so it "
            "can't take packed pairs. For its own batches use tritonpack.patch(trainer.model, share_prefixes=True). "
            "For packed pairs write the loss in a loop of your own, as examples/train_dpo_packed.py does."
        )
    if not own_form and isinstance(first, Mapping) and "input_ids" not in first:
        raise ValueError(
            f"packed rows need documents with input_ids; the {type(trainer).__name__}'s have the columns "
            f"{', '.join(sorted(map(str, first)))}. Tokenize text first. A trainer of preferences makes batches of its "
            "own; for its model use tritonpack.patch(trainer.model, share_prefixes=True)."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer would divide a packed row among {args.n_gpu} GPUs (DataParallel). Start one process per GPU with "
            "torchrun or accelerate launch, or make one GPU visible: CUDA_VISIBLE_DEVICES=0."
        )
    sizes = {name: getattr(trainer, f"get_{name}_size", lambda: 1)() for name in ("tp", "cp", "sp")}
    if any(size > 1 for size in sizes.values()):
        raise ValueError(
            f"setup gives every process rows of its own, and this training shares batches among processes ({sizes}). "
            "Train without that parallelism, or enter tritonpack.SequenceParallel around trainer.train()."
        )
    if contradictions := _contradictions(trainer):
        raise ValueError(f"packed rows can't have {'; nor '.join(contradictions)}.")
    if isinstance(collator, PackingCollator) and collator.objective != labels:
        raise ValueError(
            f"the trainer's PackingCollator has objective={collator.objective!r}, and training would use {labels!r}. "
            f"Pass labels={collator.objective!r} to setup, or change the collator, which evaluation uses."
        )
    unweighted = not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None
    if unweighted and args.gradient_accumulation_steps * args.world_size > 1:
        raise ValueError(
            f"Trainer doesn't pass num_items_in_batch to {type(trainer.model).__name__}, so rows with few targets "
            "would weigh as much as rows with many. If the model's loss divides by it, as in image-text models of "
            "transformers, set model.accepts_loss_kwargs = True before the trainer is made. Else pass a "
            "compute_loss_func to the trainer, or use one process and gradient_accumulation_steps=1."
        )


def _contradictions(trainer: Trainer) -> list[str]:
    """The options that can't be meant together with packed rows, each with its value and the remedy."""
    args, accelerating = trainer.args, trainer.args.accelerator_config
    strategy = getattr(args, "train_sampling_strategy", "random")
    own = "pass False, because every process loads its own rows"
    found = [
        ("auto_find_batch_size", args.auto_find_batch_size, "pass False, and lower tokens if memory is short"),
        ("dataloader_drop_last", args.dataloader_drop_last, "pass False, or tail='drop' to setup"),
        ("split_batches", accelerating.split_batches, own),
        ("dispatch_batches", accelerating.dispatch_batches, own),
        ("packing", getattr(args, "packing", False), "pass packing=False to SFTConfig, because setup packs itself"),
        ("padding_free", getattr(args, "padding_free", False), "pass False to SFTConfig, because setup packs itself"),
        ("train_sampling_strategy", strategy not in ("random", "sequential") and strategy, "pass 'random'"),
    ]
    texts = [f"{option}={value!r} ({remedy})" for option, value, remedy in found if value]
    if args.world_size > 1 and not args.average_tokens_across_devices:
        texts.append("average_tokens_across_devices=False (pass True, because ranks hold different numbers of targets)")
    return texts
