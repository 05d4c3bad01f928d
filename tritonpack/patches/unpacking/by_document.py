"""Packed rows run with one document in each row: for models that give one result a row, search a row for special
tokens, or can't be told of several documents in it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tritonpack.patches.call_arguments import in_form
from tritonpack.patches.labels import IGNORED, shifts_labels
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.packing_context import HANDED, InstanceForward, PackingContext
from tritonpack.patches.tokens import text_config
from tritonpack.patches.unpacking.choices import Choices, rows_of_choices
from tritonpack.patches.unpacking.documents import Documents, require_one_document_a_row
from tritonpack.patches.unpacking.rows import (
    CONDITIONED,
    OF_OTHERS,
    ONE_DOCUMENT_A_ROW,
    Group,
    LaidBack,
    batch_of,
    groups_of,
    mask_of,
)

# What such a call has of each document.
TARGETS = ("labels", "next_sentence_label", "sentence_order_label", "question_lengths")

# Of these, and of others, those whose losses aren't means over labels of tokens alone.
OTHER_TARGETS = re.compile(r"next_sentence_label|sentence_order_label|question_lengths|\w+_labels")

# What says how a row is packed, and means nothing for a row with one document.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "decoder_seq_idx", HANDED)


class ByDocument(InstanceForward):
    """The forward of a whole model, which can run the documents of packed rows with one in each row.

    Attributes:
        by_length: whether documents of one length run at a time, without padding.
        each: whether each document runs in a call of its own.
        mixed_loss: what is wrong with the model's own loss of packed documents, where a trial has seen something.
    """

    by_length = each = False
    mixed_loss = ""

    def __init__(self, module: nn.Module, context: PackingContext) -> None:
        super().__init__(module, context)
        parameters = inspect.signature(module.forward).parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.one_result = ONE_DOCUMENT_A_ROW.fullmatch(self.name) is not None

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in the form in which they are read."""
        return in_form(super().bound(args, kwargs))

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def takes(self, argument: str) -> bool:
        return self.takes_any or argument in self.names

    @property
    def takes_use_cache(self) -> bool:
        return "use_cache" in self.names

    @property
    def calls(self) -> str:
        """What documents of packed rows run in, where not in one batch."""
        return "each document in a call of its own" if self.each else "documents of one length at a time"

    @property
    def pad_token(self) -> int | None:
        return getattr(text_config(self.module.config), "pad_token_id", None)

    def with_names(self, arguments: dict[str, Any]) -> Any:
        """Run a user's call with named outputs; where `return_dict` is false, the user gets them as a tuple."""
        wanted = arguments.get("return_dict")
        if wanted is None:  # as PEFT passes it
            wanted = getattr(self.module.config, "return_dict", True)
        if wanted or not self.takes("return_dict"):
            return self.run(arguments)
        return self.run({**arguments, "return_dict": True}).to_tuple()

    def require_known_loss(self, arguments: Mapping[str, Any], packed_batch: PackedBatch | None) -> None:
        """Refuse labels of packed rows where the model's own loss mixes documents.

        Raises:
            ValueError: the message says what a trial has seen.
        """
        if self.mixed_loss and arguments.get("labels") is not None and packed_batch is not None:
            require_one_document_a_row(
                packed_batch,
                f"{self.name} has a loss of its own, which isn't that of packed documents: on a few tokens "
                f"{self.mixed_loss}. Leave labels out and compute the loss of each document's outputs, or give each "
                "document a row of its own, unpatched.",
            )

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run a call whose outputs have names."""
        raise NotImplementedError

    def run_rows(self, arguments: dict[str, Any]) -> Any:
        """Run the model on rows of one document each."""
        raise NotImplementedError

    def run_by_document(
        self, documents: Mapping[str, Documents], arguments: Mapping[str, Any], *, one_choice: bool = False
    ) -> Any:
        """Run packed rows with one document in each row.

        Args:
            documents: of each side, "" and "decoder", in the packed rows.
            arguments: of the call, by name.
            one_choice: add a dimension for choices, of which there is one: tokens are (documents, 1, longest).

        Returns:
            The model's output in packed rows: what has a value for each token is laid back, (B, T, ...); what has one
            for each document is (documents, ...). No cache is left.

        Raises:
            ValueError: an argument, or an output, belongs to no document.
        """
        self._require_pairs(documents)
        count = len(next(iter(documents.values())))
        if self.one_result and not one_choice:
            require_one_target_each("document", count, arguments, self.name)
        labels = arguments.get("labels")
        if isinstance(labels, Tensor) and (labels.ndim == 1 or (labels.ndim == 2 and labels.is_floating_point())):
            require_one_target_each("document", count, {"labels": labels}, self.name)
        left_out = (*PACKING, *map(mask_of, documents), "logits_to_keep", "use_cache")
        kept = {name: x for name, x in arguments.items() if name not in left_out and not self._is_nothing(name, x)}
        if self.takes_use_cache:
            kept["use_cache"] = False
        outputs, weights, batches = [], [], []
        decodes = "decoder_input_ids" in self.names
        groups = groups_of(documents, self.by_length, self.each)
        if len(groups) > 1 and self.across and arguments.get("return_loss"):
            raise ValueError(
                f"{self.name} runs documents of one length at a time, so its loss of all texts and images can't "
                "be put together. Compute it of logits_per_text, and leave return_loss out."
            )
        for group in groups:
            batch = batch_of(
                group,
                kept,
                takes=self.takes,
                pad_token=self.pad_token,
                targets=TARGETS if self.one_result else TARGETS[1:],
                decodes=decodes,
                of_documents=self._of_documents,
            )
            if one_choice:  # all heads flatten token ids; DistilBERT's and XLNet's pass position_ids on as they are
                apart = [name for name, x in batch.items() if _is_of_tokens(x, batch) and name != "position_ids"]
                batch |= {name: batch[name][:, None] for name in apart}
            weights.append(self._weight(batch, len(groups)))
            outputs.append(self.run_rows(batch))
            batches.append(batch)
        labelled = [batch for batch, weight in zip(batches, weights, strict=True) if bool(weight)]
        counted = len(groups) > 1 and labelled and "labels" in labelled[0]
        if counted and labelled[0].get("num_items_in_batch") is not None and self._divides_by_count(labelled[0]):
            weights = []  # losses add up
        merge = LaidBack(groups, weights, self.name, across=self.across, decodes=decodes)
        output = merge.of(outputs)
        if merge.of_documents:
            self._require_known_padding(documents, arguments, merge.of_documents)
        return _chosen(output, arguments.get("logits_to_keep"))

    def run_choices(self, choices: Choices, arguments: Mapping[str, Any]) -> Any:
        """Run packed rows of choices: each choice by itself, as the only one of its question."""
        rows = {name: rows_of_choices(x, choices.shape) for name, x in arguments.items()}
        labels = rows.pop("labels", None)
        questions = len(choices.documents) // choices.shape[1]
        require_one_target_each("question", questions, {"labels": labels}, self.name)
        output = self.run_by_document({"": choices.documents}, rows, one_choice=True)
        logits = output["logits"].view(questions, choices.shape[1])
        loss = None if labels is None else cross_entropy(logits, labels.to(logits.device))
        return type(output)(**{"loss": loss, **output, "logits": logits})  # made anew, for the loss to come first

    def _is_nothing(self, name: str, value: Any) -> bool:
        """Whether an argument is None and the model's own forward doesn't take it."""
        return value is None and not self.takes(name)

    def _require_known_padding(
        self, documents: Mapping[str, Documents], arguments: Mapping[str, Any], output: str
    ) -> None:
        """Refuse rows whose end may be padding or documents, for outputs with a value for each document."""
        ids = arguments.get("input_ids")
        if ids is None or ids.shape[1] < 2 or "" not in documents or arguments.get("attention_mask") is not None:
            return
        single = documents[""].lay_back((documents[""].inside.sum(1, keepdim=True) == 1) & documents[""].inside)
        if bool((single[:, -2:].all(1) & (ids[:, -1] == ids[:, -2])).any()):
            raise ValueError(
                f"{self.name} gives {output} for each document, a row ends in documents of the same single token, "
                "and nothing says whether they are padding. Pass attention_mask, 0 for padding, or set "
                "config.pad_token_id to the tokenizer's."
            )

    @property
    def across(self) -> bool:
        """Whether the model holds all texts against all images or sounds, as CLIP does."""
        return hasattr(type(self.module), "get_text_features") and not CONDITIONED.fullmatch(self.name)

    def _of_documents(self, name: str, value: Tensor, group: Group) -> Tensor:
        """What the documents of a group get of an argument that has no value a token.

        Targets are of documents; images and sounds of documents, or of rows, whose documents share them. Models that
        put images in the place of tokens take them in the order of tokens.
        """
        of_frames = name.startswith("decoder_") and "decoder_input_ids" not in self.names
        if of_frames and name == mask_of("decoder") and int(value.max()) > 1:
            raise ValueError(
                f"{name} numbers documents up to {int(value.max())}, and {self.name} takes frames of sound, which "
                "aren't packed. Pass 0 and 1, in a row for each document, in order, with its frames."
            )
        others = value.ndim > 1 and (value.is_floating_point() or of_frames or OF_OTHERS.fullmatch(name) is not None)
        if others and (self.across or self._puts_images_among_tokens):
            if self.by_length and not self.across:
                raise ValueError(
                    f"{self.name} runs documents of one length at a time, and {name} doesn't say which of them it "
                    "belongs to. Give each document a row of its own, unpatched."
                )
            return value
        if value.ndim and value.shape[0] == group.count:
            return value[group.numbers.to(value.device)]
        if others and value.shape[0] == group.tokens[0]:
            return value[group.rows.to(value.device)]
        if others:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but the packed rows hold {group.count} documents in "
                f"{group.tokens[0]} rows. Pass one for each document, in order, or one for each row."
            )
        return value

    @property
    def _puts_images_among_tokens(self) -> bool:
        names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index")
        return any(getattr(self.module.config, name, None) is not None for name in names)

    def _weight(self, batch: Mapping[str, Any], calls: int) -> Tensor:
        """How many labels the loss of a call is a mean over."""
        labels = batch.get("labels")
        others = [name for name, x in batch.items() if x is not None and OTHER_TARGETS.fullmatch(name)]
        others += ["labels"] if isinstance(labels, Tensor) and labels.ndim > 2 else []  # of codebooks or of frames
        if calls > 1 and others:
            raise ValueError(
                f"{self.name} runs {self.calls}, so its loss of {others[0]} can't be put together. Compute it of the "
                f"outputs, without {others[0]}, or give each document a row of its own, unpatched."
            )
        if not isinstance(labels, Tensor):
            return torch.tensor(1)
        if labels.is_floating_point():
            return torch.tensor(labels.shape[0])
        shifted = labels.ndim == 2 and not self.one_result and shifts_labels(self.module, batch)
        return (labels[:, 1:] if shifted else labels).ne(IGNORED).sum()

    @torch.no_grad()
    def _divides_by_count(self, batch: Mapping[str, Any]) -> bool:
        """Whether the model's loss is a sum divided by `num_items_in_batch`; else it is a mean, whatever that says.

        Both have that argument, so a call is made with the count, and one with twice the count.
        """
        count = batch["num_items_in_batch"]
        devices = sorted({p.device.index for p in self.module.parameters() if p.device.type == "cuda"})
        losses = []
        for times in (1, 2):
            with torch.random.fork_rng(devices=devices):  # the same dropout in both, and in what follows
                losses.append(self.run_rows({**batch, "num_items_in_batch": times * count})["loss"])
        return bool((losses[1] - losses[0] / 2).abs() < (losses[1] - losses[0]).abs())

    def _require_pairs(self, documents: Mapping[str, Documents]) -> None:
        if len(documents) < 2:
            return
        rows = {side: found.rows.bincount(minlength=found.tokens[0]).tolist() for side, found in documents.items()}
        if rows[""] != rows["decoder"]:
            raise ValueError(
                f"rows hold {rows['']} documents in the encoder and {rows['decoder']} in the decoder. Tell documents "
                "apart on both sides: the encoder's by attention_mask, cu_seq_lens_k, seq_idx or position_ids, the "
                "decoder's by decoder_attention_mask, cu_seq_lens_q, decoder_seq_idx or decoder_position_ids."
            )


def _is_of_tokens(value: Any, batch: Mapping[str, Any]) -> bool:
    """Whether an argument has a value for each token of a batch."""
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return isinstance(value, Tensor) and value.shape[:2] == tokens.shape[:2]


def require_one_target_each(one: str, count: int, arguments: Mapping[str, Any], model: str) -> None:
    """Refuse labels of a head with one result for each document, or for each question, where there are more or fewer.

    Raises:
        ValueError: with their shape, and how many there should be.
    """
    for name in TARGETS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.shape[:1] != (count,):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but the packed rows hold {count} {one}s, and {model} gives "
                f"one result a {one}, in order. Pass {name} of shape ({count},), or ({count}, ...) where a {one} has "
                "several."
            )


def _chosen(output: Any, keep: int | Tensor | None) -> Any:
    """Logits of the tokens that were asked for: the last so many of a row, or those at these places."""
    if keep is None or (isinstance(keep, int) and keep == 0) or not isinstance(output, Mapping):
        return output
    if isinstance(output.get("logits"), Tensor):
        output["logits"] = output["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]  # type: ignore[index]
    return output
