"""The forward of a whole model that can run the documents of packed rows with one document in each row.

Models run in this way if they give one result for each row, search a row for special tokens, or can't keep several
documents in a row apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tritonpack.patches.call_arguments import PACKING, tokens_of
from tritonpack.patches.labels import IGNORED, shifts_labels
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.unpacking.arguments import batch_of, groups_of
from tritonpack.patches.unpacking.choices import Choices, rows_of_choices
from tritonpack.patches.unpacking.document_places import Documents, require_one_document_a_row
from tritonpack.patches.unpacking.names import OTHER_TARGETS, TARGETS, mask_of
from tritonpack.patches.unpacking.outputs import LaidBack
from tritonpack.patches.unpacking.spans import take_spans
from tritonpack.patches.unpacking.whole_model import WholeModel


class UnpackingForward(WholeModel):
    """The forward of a whole model, which can run the documents of packed rows with one document in each row.

    Attributes:
        mixed_loss: what a trial found wrong with the model's own loss of packed documents; empty if nothing.
    """

    mixed_loss = ""

    @property
    def calls(self) -> str:
        return "each document in a call of its own" if self.each else "documents of one length at a time"

    def with_names(self, arguments: dict[str, Any]) -> Any:
        """Run a user's call with named outputs. If `return_dict` is false, the user gets a tuple."""
        wanted = arguments.get("return_dict")
        if wanted is None:  # PEFT passes None
            wanted = getattr(self.module.config, "return_dict", True)
        if wanted or not self.takes("return_dict"):
            return self.run(arguments)
        return self.run({**arguments, "return_dict": True}).to_tuple()

    def require_known_loss(self, arguments: Mapping[str, Any], packed_batch: PackedBatch) -> None:
        """Refuse labels of packed rows if the model's own loss mixes documents."""
        if self.mixed_loss and arguments.get("labels") is not None:
            require_one_document_a_row(
                packed_batch,
                f"{self.name} has a loss of its own, which isn't the loss of packed documents: on a few tokens "
                f"{self.mixed_loss}. Leave labels out and compute the loss of each document's outputs, or give each "
                "document a row of its own, unpatched.",
            )

    def with_loss(self, run: Callable[[], Any], arguments: dict[str, Any], packed_batch: PackedBatch | None) -> Any:
        """The output that `run` computes of a packed call. The loss of question answering is computed by document.

        Args:
            arguments: the call's arguments; positions of spans are taken out of them.
            packed_batch: the packing of the tokens that have logits; None if no argument marks documents.
        """
        if packed_batch is None:
            return run()
        self.require_known_loss(arguments, packed_batch)
        spans = take_spans(arguments, packed_batch, self.module, self.own)
        output = run()
        return output if spans is None else spans.add_loss(output, self.name)

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run a call whose outputs have names."""
        raise NotImplementedError

    def run_rows(self, arguments: dict[str, Any]) -> Any:
        """Run the model on rows of one document each."""
        raise NotImplementedError

    def run_by_document(
        self, documents: Mapping[str, Documents], arguments: Mapping[str, Any], *, one_choice: bool = False
    ) -> Any:
        """Run packed rows with one document in each row. No cache is left.

        Args:
            documents: the documents of each side, "" and "decoder", in the packed rows.
            arguments: the call's arguments by name.
            one_choice: add a dimension for choices, of which there is one: tokens are (documents, 1, longest).

        Returns:
            Outputs with a value for each token as (B, T, ...), those with one for each document as (documents, ...).
        """
        self._require_pairs(documents)
        count = len(next(iter(documents.values())))
        if self.one_result and not one_choice:
            require_one_target_each("document", count, arguments, self.name)
        labels = arguments.get("labels")
        if isinstance(labels, Tensor) and (labels.ndim == 1 or (labels.ndim == 2 and labels.is_floating_point())):
            require_one_target_each("document", count, {"labels": labels}, self.name)
        left_out = (*PACKING, *map(mask_of, documents), "logits_to_keep", "use_cache")
        kept = {n: x for n, x in arguments.items() if n not in left_out and (x is not None or self.takes(n))}
        if self.takes_use_cache:
            kept["use_cache"] = False
        groups = groups_of(documents, self.by_length, self.each)
        if len(groups) > 1 and self.across and arguments.get("return_loss"):
            raise ValueError(
                f"{self.name} runs documents of one length at a time, so its loss of all texts and images can't "
                "be combined. Compute it from logits_per_text, and leave return_loss out."
            )
        batches = [batch_of(group, kept, self) for group in groups]
        if one_choice:
            batches = list(map(_with_one_choice, batches))
        weights = [self._weight(batch, len(groups)) for batch in batches]
        outputs = [self.run_rows(batch) for batch in batches]
        merge = LaidBack(groups, [] if self._is_summed(batches, weights) else weights, self)
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
        return type(output)(**{"loss": loss, **output, "logits": logits})  # a new one: the loss comes first in a tuple

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

    # The loss of several calls

    def _weight(self, batch: Mapping[str, Any], calls: int) -> Tensor:
        """How many labels the loss of a call is a mean over."""
        labels = batch.get("labels")
        others = [name for name, x in batch.items() if x is not None and OTHER_TARGETS.fullmatch(name)]
        others += ["labels"] if isinstance(labels, Tensor) and labels.ndim > 2 else []  # of codebooks or of frames
        if calls > 1 and others:
            raise ValueError(
                f"{self.name} runs {self.calls}, so its loss of {others[0]} can't be combined. Compute it from the "
                f"outputs, without {others[0]}, or give each document a row of its own, unpatched."
            )
        if not isinstance(labels, Tensor):
            return torch.tensor(1, device="cpu")
        if labels.is_floating_point():
            return torch.tensor(labels.shape[0], device="cpu")
        shifted = labels.ndim == 2 and not self.one_result and shifts_labels(self.module, batch)
        return (labels[:, 1:] if shifted else labels).ne(IGNORED).sum()

    @torch.no_grad()
    def _is_summed(self, batches: Sequence[Mapping[str, Any]], weights: Sequence[Tensor]) -> bool:
        """Whether the losses of several calls add up: each is a sum divided by `num_items_in_batch`.

        A model may take that argument and give the mean of its labels all the same. So one of the calls runs with the
        count, and with twice the count.
        """
        batch = next((batch for batch, weight in zip(batches, weights, strict=True) if bool(weight)), {})
        count = batch.get("num_items_in_batch")
        if len(batches) == 1 or "labels" not in batch or count is None:
            return False
        devices = sorted({p.device.index for p in self.module.parameters() if p.device.type == "cuda"})
        losses = []
        for times in (1, 2):
            with torch.random.fork_rng(devices=devices):  # the same dropout in both, and in later calls
                losses.append(self.run_rows({**batch, "num_items_in_batch": times * count})["loss"])
        return bool((losses[1] - losses[0] / 2).abs() < (losses[1] - losses[0]).abs())


def _with_one_choice(batch: dict[str, Any]) -> dict[str, Any]:
    """Arguments with a dimension for choices. DistilBERT's and XLNet's heads pass on position_ids as they get them."""
    tokens, _ = tokens_of(batch)
    assert tokens is not None
    of_tokens = [n for n, x in batch.items() if isinstance(x, Tensor) and x.shape[:2] == tokens.shape[:2]]
    return {**batch, **{name: batch[name][:, None] for name in of_tokens if name != "position_ids"}}


def require_one_target_each(one: str, count: int, arguments: Mapping[str, Any], model: str) -> None:
    """Refuse more or fewer targets than there are documents, or questions, in a head with one result for each."""
    for name in TARGETS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.shape[:1] != (count,):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but the packed rows hold {count} {one}s, and {model} gives "
                f"one result a {one}, in order. Pass {name} of shape ({count},), or ({count}, ...) where a {one} has "
                "several."
            )


def _chosen(output: Any, keep: int | Tensor | None) -> Any:
    """An output with the logits that `logits_to_keep` asks for: the last `keep` of a row, or those at these places."""
    if keep is None or (isinstance(keep, int) and keep == 0) or not isinstance(output, Mapping):
        return output
    if isinstance(output.get("logits"), Tensor):
        output["logits"] = output["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]  # type: ignore[index]
    return output
