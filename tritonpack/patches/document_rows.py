"""Models that can't be told of several documents in a row: each document gets a row of its own.

The model runs as it is, with its own attention, on the documents of packed rows laid out as a padded batch. What it
gives for each token is laid back into the packed rows. Where padding changes what a model computes, documents of one
length run at a time, without padding. Exact, and no faster than a batch of documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tritonpack import notices
from tritonpack.patches.both_sides import SOURCE, TARGET
from tritonpack.patches.by_document import ONE_DOCUMENT_A_ROW, TARGETS, require_one_target_each
from tritonpack.patches.choices import Choices, compares_choices, rows_of_choices
from tritonpack.patches.current import UNCLAIMED, Current, InstanceForward, ModuleRef
from tritonpack.patches.documents import Documents, require_one_document_a_row
from tritonpack.patches.families import HEADS_SHIFT
from tritonpack.patches.hooks import CACHES
from tritonpack.patches.interface import stock_name
from tritonpack.patches.labels import IGNORED, shifts_labels
from tritonpack.patches.near_misses import refuse_near_misses
from tritonpack.patches.packing import Packing, Serving
from tritonpack.patches.reading import make_packing
from tritonpack.patches.rows import OF_OTHERS, Group, LaidBack, batch_of, groups_of, mask_of
from tritonpack.patches.spans import take_spans
from tritonpack.patches.tokens import text_config

# Who serves the masks: nobody asks for one.
NOBODY = Serving("dense", "auto")

# What a model with one kind of tokens reads documents from.
ONE_SIDE = {name: name for name in ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q")}

# Arguments that may come along, and say nothing of their own.
LENGTHS = ("cu_seq_lens_k", "max_length_q", "max_length_k")


class StockAttention:
    """A module of such a model, which keeps the attention that it had; a model that was given our name has none, and
    gets transformers' default.

    Attributes:
        replaced: the name of the attention that the module's config had before.
    """

    replaced: str | None = UNCLAIMED

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = ModuleRef(module)

    @property
    def module(self) -> PreTrainedModel:
        return self._module.module

    def attention_name(self, before: str | None) -> str:
        """What the attention is called from now on."""
        return stock_name(self.module, before)


class DocumentRows(InstanceForward):
    """The forward of a model that runs with one document a row, whatever rows it is given.

    Attributes:
        by_length: whether documents of one length run at a time, without padding.
    """

    def __init__(self, module: PreTrainedModel, current: Current, by_length: bool) -> None:
        super().__init__(module, current)
        self.by_length = by_length or makes_vectors_of_padding(module)
        parameters = inspect.signature(module.forward).parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.both = "decoder_input_ids" in self.names
        self.known = frozenset((*self.names, *ONE_SIDE, *(TARGET.values() if self.both else ()), *LENGTHS))
        self.one_result = ONE_DOCUMENT_A_ROW.fullmatch(self.name) is not None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def takes(self, argument: str) -> bool:
        return self.takes_any or argument in self.names

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        if self.current.state.running:  # inside of a model whose documents have rows of their own
            return self.inner(**arguments)
        refuse_near_misses(arguments, self.known, self.name)
        wanted = arguments.get("return_dict")
        if wanted is None:
            wanted = getattr(self.module.config, "return_dict", True)
        if wanted or not self.takes("return_dict"):
            return self._run(arguments)
        return self._run({**arguments, "return_dict": True}).to_tuple()

    def _run(self, arguments: dict[str, Any]) -> Any:
        choices = Choices.of(arguments, self.module, NOBODY, left=False)
        if choices is not None:
            return self._run_choices(choices, arguments)
        if compares_choices(self.module):  # each choice holds one document
            return self._inside(arguments)
        cached = any(arguments.get(name) is not None for name in CACHES)
        packings = self._read(arguments, cached)
        arguments = {name: x for name, x in arguments.items() if self.takes(name) or "position_ids" in name}
        if cached or not any(packing.tells_documents for packing in packings.values()):
            return self._inside(arguments)
        laid_out = {side: Documents.of(packing, always=True) for side, packing in packings.items()}
        documents = {side: found for side, found in laid_out.items() if found is not None}
        packed = any(found.packed for found in documents.values())
        if not documents or (not packed and arguments.get("use_cache")):
            padding = {mask_of(side): packing.not_padding().long() for side, packing in packings.items()}
            return self._inside({**arguments, **{mask: x for mask, x in padding.items() if self.takes(mask)}})
        if packed and not torch.compiler.is_compiling():
            self._say_so()
        spans = take_spans(arguments, packings[""], self.module, self.own) if "" in packings else None
        output = self._run_by_document(documents, arguments)
        return output if spans is None else spans.add_loss(output, self.name)

    def _run_choices(self, choices: Choices, arguments: dict[str, Any]) -> Any:
        """Each choice of a question runs by itself, as the only one; then its questions are put together."""
        rows = {name: rows_of_choices(x, choices.shape) for name, x in arguments.items()}
        labels = rows.pop("labels", None)
        output = self._run_by_document({"": choices.documents}, rows, one_choice=True)
        logits = output["logits"].view(-1, choices.shape[1])
        if labels is not None:
            require_one_target_each("question", len(logits), {"labels": labels}, self.name)
        loss = None if labels is None else cross_entropy(logits, labels.to(logits.device))
        return type(output)(**{"loss": loss, **output, "logits": logits})

    def _say_so(self) -> None:
        how = "documents of one length at a time" if self.by_length else "a padded batch"
        notices.say_once(
            f"document-rows-{self.name.lower()}",
            f"{self.name} can't be told of several documents in a row, so each gets a row of its own, in {how}: exact, "
            "and no faster than without packing.",
        )

    def _run_by_document(
        self, documents: Mapping[str, Documents], arguments: dict[str, Any], *, one_choice: bool = False
    ) -> Any:
        self._require_pairs(documents)
        count = len(next(iter(documents.values())))
        if self.one_result:
            require_one_target_each("document", count, arguments, self.name)
        keep = arguments.pop("logits_to_keep", None)
        read = {name for side in documents for name in (TARGET if side else SOURCE).values()} | {*ONE_SIDE, *LENGTHS}
        kept = {name: x for name, x in arguments.items() if name not in read or "position_ids" in name}
        if "use_cache" in self.names:
            kept["use_cache"] = False
        outputs, weights = [], []
        groups = groups_of(documents, self.by_length)
        for group in groups:
            batch = batch_of(
                group, kept, takes=self.takes, pad_token=self._pad_token, count=count, of_documents=self._of_rows
            )
            if one_choice:
                batch = {name: x[:, None] if _is_per_token(x, batch) else x for name, x in batch.items()}
            outputs.append(self._inside(batch))
            weights.append(self._weight(batch, len(group), len(groups)))
        merge = LaidBack(groups, weights, self.name)
        output = merge.of(outputs)
        if merge.of_documents:
            self._require_known_padding(documents, arguments, merge.of_documents)
        return _chosen(output, keep)

    def _require_known_padding(
        self, documents: Mapping[str, Documents], arguments: Mapping[str, Any], output: str
    ) -> None:
        """Refuse rows that may end in padding where nothing tells it from documents, and each document counts."""
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

    def _of_rows(self, name: str, value: Tensor, group: Group) -> Tensor:
        """What each document gets of images and sounds that were given for each row: those of its row.

        Models that hold texts against images make all pairs; those that put images in the place of tokens take them in
        the order of tokens.
        """
        rows = group.sides[next(iter(group.sides))].tokens[0]
        across = hasattr(type(self.module), "get_text_features")
        other = value.ndim > 1 and (value.is_floating_point() or OF_OTHERS.fullmatch(name) is not None)
        if not other or value.shape[0] != rows or across or self._puts_images_among_tokens:
            if other and self.by_length and self._puts_images_among_tokens:
                raise ValueError(
                    f"{self.name} runs documents of one length at a time, and {name} doesn't say which of them it "
                    "belongs to. Give each document a row of its own, unpatched."
                )
            return value
        return value[group.rows.to(value.device)]

    @property
    def _puts_images_among_tokens(self) -> bool:
        names = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index")
        return any(getattr(self.module.config, name, None) is not None for name in names)

    def _weight(self, batch: Mapping[str, Any], documents: int, calls: int) -> Tensor:
        """How many labels the loss of a call is a mean over; the same for all calls where it is a sum."""
        labels = batch.get("labels")
        others = [name for name in TARGETS if name != "labels" and batch.get(name) is not None]
        if calls > 1 and others:
            raise ValueError(
                f"{self.name} runs documents of one length at a time, so its loss of {others[0]} can't be put "
                f"together. Compute it of the outputs, without {others[0]}."
            )
        if not isinstance(labels, Tensor) or batch.get("num_items_in_batch") is not None:
            return torch.tensor(1.0)
        if labels.ndim == 2 and not self.one_result:
            return (labels[:, int(shifts_labels(self.module, batch)) :] != IGNORED).sum()
        return torch.tensor(documents)

    def _inside(self, arguments: dict[str, Any]) -> Any:
        outer = self.current.state.running, self.current.state.packing
        self.current.set(True, None)
        try:
            return self.inner(**arguments)
        finally:
            self.current.set(*outer)

    # Reading

    def _read(self, arguments: dict[str, Any], cached: bool) -> dict[str, Packing]:
        """What a call says of the documents of each side, "" and "decoder"."""
        source = _tokens(arguments, "input_ids", "inputs_embeds")
        target = _tokens(arguments, "decoder_input_ids", "decoder_inputs_embeds") if self.both else None
        if self.both and target is None:
            target = self._labels(arguments)
        names = ONE_SIDE if target is None else SOURCE
        sides = {"": (source, names), "decoder": (target, TARGET)}
        return {
            side: self._packing(arguments, side, tokens, names, cached)
            for side, (tokens, names) in sides.items()
            if tokens is not None
        }

    def _labels(self, arguments: dict[str, Any]) -> Tensor | None:
        """The labels of a decoder whose tokens the model makes of them."""
        labels = arguments.get("labels")
        shifts = getattr(self.module.config, "is_encoder_decoder", False) and not self.name.endswith(HEADS_SHIFT)
        return labels if shifts and isinstance(labels, Tensor) and labels.ndim == 2 else None

    def _packing(
        self, arguments: dict[str, Any], side: str, tokens: Tensor, names: Mapping[str, str], cached: bool
    ) -> Packing:
        shape = torch.Size(tokens.shape[:2])
        said = {name: arguments.get(here) for name, here in names.items()}
        mask = said["attention_mask"]
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise ValueError(
                f"{names['attention_mask']} must be two-dimensional, 0 for padding and 1, or a document's number, for "
                f"tokens; got {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}. "
                f"{self.name} runs with one document a row, and makes other masks itself."
            )
        if cached and mask is not None and mask.shape != shape:  # of the keys in the cache as well
            said["attention_mask"] = None
        ids = tokens if tokens.ndim == 2 else None
        pad = self._pad_token
        packing = make_packing({**said, "input_ids": ids}, shape, tokens.device, NOBODY, pad)
        if cached:
            require_one_document_a_row(
                packing,
                f"{self.name} runs with one document a row, so packed rows can't use a cache. Pass "
                "past_key_values=None.",
            )
        return packing

    @property
    def _pad_token(self) -> int | None:
        return getattr(text_config(self.module.config), "pad_token_id", None)

    def _require_pairs(self, documents: Mapping[str, Documents]) -> None:
        if len(documents) < 2:
            return
        rows = {side: found.rows.bincount(minlength=found.tokens[0]).tolist() for side, found in documents.items()}
        if rows[""] != rows["decoder"]:
            raise ValueError(
                f"rows hold {rows['']} documents in the encoder and {rows['decoder']} in the decoder. Tell documents "
                f"apart on both sides: the encoder's by {', '.join(SOURCE.values())}, the decoder's by "
                f"{', '.join(TARGET.values())}."
            )


def _is_per_token(value: Any, batch: Mapping[str, Any]) -> bool:
    """Whether an argument has a value for each token of a batch."""
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return isinstance(value, Tensor) and value.shape[:2] == tokens.shape[:2]


def makes_vectors_of_padding(module: PreTrainedModel) -> bool:
    """Whether a head makes one vector of a row's last token, or of all of them, padding or not: XLM's may."""
    return any(getattr(inner, "summary_type", None) in ("last", "cls_index", "mean") for inner in module.modules())


def _tokens(arguments: Mapping[str, Any], *names: str) -> Tensor | None:
    return next((arguments[name] for name in names if isinstance(arguments.get(name), Tensor)), None)


def _chosen(output: Any, keep: int | Tensor | None) -> Any:
    """Logits of the tokens that were asked for: the last so many of a row, or those at these places."""
    if keep is None or (isinstance(keep, int) and keep == 0) or not isinstance(output, Mapping):
        return output
    if isinstance(output.get("logits"), Tensor):
        output["logits"] = output["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]  # type: ignore[index]
    return output
