"""Models that can't be told of several documents in a row: they run with one document in each row of a padded batch.

The model runs as it is, with its own attention, on the documents of packed rows laid out as a padded batch; what it
gives for each token is laid back into the packed rows. Exact wherever padding is, and as slow.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack import notices
from tritonpack.patches.both_sides import SOURCE, TARGET
from tritonpack.patches.by_document import OF_DOCUMENTS, ONE_DOCUMENT_A_ROW, require_one_target_each
from tritonpack.patches.current import UNCLAIMED, Current, InstanceForward
from tritonpack.patches.documents import Documents, require_one_document_a_row
from tritonpack.patches.hooks import CACHES
from tritonpack.patches.interface import stock_name
from tritonpack.patches.labels import IGNORED
from tritonpack.patches.near_misses import refuse_near_misses
from tritonpack.patches.packing import Packing, Serving
from tritonpack.patches.reading import make_packing
from tritonpack.patches.tokens import text_config

# Who serves the masks: nobody asks for one.
NOBODY = Serving("dense", "auto")

# What a model with one kind of tokens reads documents from.
ONE_SIDE = {name: name for name in ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")}

# Arguments by which some say how long documents are; nothing reads them.
LENGTHS = ("max_length_q", "max_length_k")

# Arguments of images and sounds: they have no value for each token of a row, whatever their shape.
OF_OTHERS = re.compile(
    r"(pixel|image|video|audio|visual|vision|speech|input_features|input_values|qformer|flattened)\w*"
)
OF_TOKENS_AFTER_ALL = re.compile(r"\w*position_mask|image_mask|visual_pos_masks")

# Outputs of two dimensions that have one value for each token.
SCORES_OF_TOKENS = re.compile(r"(start|end)_logits|start_positions|end_positions|decision_logits")


class DocumentRows(InstanceForward):
    """The forward of a model that runs with one document a row, whatever rows it is given.

    Attributes:
        replaced: the name of the attention that the model's config had before.
    """

    replaced: str | None = UNCLAIMED

    def __init__(self, module: PreTrainedModel, current: Current) -> None:
        super().__init__(module, current)
        parameters = inspect.signature(module.forward).parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.both = "decoder_input_ids" in self.names
        self.known = frozenset((*self.names, *ONE_SIDE, *(TARGET.values() if self.both else ()), *LENGTHS))
        self.one_result = ONE_DOCUMENT_A_ROW.fullmatch(self.name) is not None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def attention_name(self, before: str | None) -> str:
        """What the attention is called from now on: as before, or transformers' default in the place of our name."""
        return stock_name(self.module, before)

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
        cached = any(arguments.get(name) is not None for name in CACHES)
        packings = self._read(arguments, cached)
        if cached or not any(packing.tells_documents for packing in packings.values()):
            return self._inside({name: x for name, x in arguments.items() if name in self.names or self.takes_any})
        packed = any(Documents.of(packing) is not None for packing in packings.values())
        if arguments.get("use_cache") and not packed:
            return self._inside(self._told_of_padding(arguments, packings))
        if packed and not torch.compiler.is_compiling():
            self._say_so()
        laid_out = {side: Documents.of(packing, always=True) for side, packing in packings.items()}
        documents = {side: found for side, found in laid_out.items() if found is not None}
        self._require_pairs(documents)
        batch = self._batch(arguments, documents)
        keep = batch.pop("logits_to_keep", None)
        output = self._inside(batch)
        return _chosen(self._laid_back(output, documents), keep)

    def _say_so(self) -> None:
        notices.say_once(
            f"document-rows-{self.name.lower()}",
            f"{self.name} can't be told of several documents in a row, so it runs with one document in each row of a "
            "padded batch: exact, and as slow as padding.",
        )

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
        sides: dict[str, tuple[Tensor | None, dict[str, str]]] = {}
        sides[""] = _tokens(arguments, "input_ids", "inputs_embeds"), SOURCE if self.both else ONE_SIDE
        if self.both:
            target = _tokens(arguments, "decoder_input_ids", "decoder_inputs_embeds")
            sides["decoder"] = self._labels(arguments) if target is None else target, TARGET
        return {
            side: self._packing(arguments, side, tokens, names, cached)
            for side, (tokens, names) in sides.items()
            if tokens is not None
        }

    def _labels(self, arguments: dict[str, Any]) -> Tensor | None:
        """The labels of a decoder whose tokens the model makes of them."""
        labels = arguments.get("labels")
        made = isinstance(labels, Tensor) and labels.ndim == 2 and self.module.get_output_embeddings() is not None
        return labels if made else None

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

    # Laying out

    def _told_of_padding(self, arguments: dict[str, Any], packings: Mapping[str, Packing]) -> dict[str, Any]:
        """The arguments of rows that hold one document each, as the model takes them."""
        batch = {name: x for name, x in arguments.items() if self.takes(name)}
        for side, packing in packings.items():
            mask = "attention_mask" if side == "" else f"{side}_attention_mask"
            if packing.tells_documents and self.takes(mask):
                batch[mask] = packing.not_padding().long()
        return batch

    def _batch(self, arguments: dict[str, Any], documents: Mapping[str, Documents]) -> dict[str, Any]:
        """The arguments of a padded batch with one document a row."""
        first = next(iter(documents.values()))
        if self.one_result:
            require_one_target_each(first, arguments, self.name)
        told = {*ONE_SIDE, *SOURCE.values(), *TARGET.values(), *LENGTHS}
        batch = {}
        for name, value in arguments.items():
            if name in told and "position_ids" not in name:
                continue
            found = self._documents_of(name, documents)
            if found is None or not isinstance(value, Tensor) or not _is_of_tokens(name, value, found):
                batch[name] = self._of_documents(name, value, first)
            elif "position_ids" not in name:
                batch[name] = _cut(found, value, self._fill(name))
            elif (positions := self._positions(name, value, found)) is not None:
                batch[name] = positions
        for side, found in documents.items():
            mask = "attention_mask" if side == "" else f"{side}_attention_mask"
            if self.takes(mask):
                batch[mask] = found.inside.long()
        if self.takes("use_cache"):
            batch["use_cache"] = False
        return batch

    def _documents_of(self, name: str, documents: Mapping[str, Documents]) -> Documents | None:
        """The documents of the side that an argument, or an output, speaks of."""
        if not self.both or len(documents) == 1:
            return next(iter(documents.values()))
        decoders = name.startswith("decoder_") or name == "labels"
        return documents.get("decoder" if decoders else "")

    def _fill(self, name: str) -> int:
        """What padding holds."""
        if name.endswith("input_ids"):
            return self._pad_token or 0
        return IGNORED if "labels" in name else 0

    def _positions(self, name: str, given: Tensor, documents: Documents) -> Tensor | None:
        """Positions that don't count each document from 0, by document; the model makes the others itself."""
        laid_out = _cut(documents, given, 0)
        counted = torch.arange(laid_out.shape[-1], device=given.device)
        if given.ndim == 2 and bool((laid_out == counted)[documents.inside.to(given.device)].all()):
            return None
        if not self.takes(name):
            raise ValueError(
                f"{name} doesn't count each document from 0, and {self.name} takes no {name}. Let it restart at 0 "
                "where a document begins."
            )
        return laid_out

    def _of_documents(self, name: str, value: Any, documents: Documents) -> Any:
        """What isn't of tokens, such as images: for each document, for all of them, or for none."""
        rows = documents.tokens[0]
        if isinstance(value, Tensor) and value.ndim > 2 and value.shape[0] == rows and rows not in (1, len(documents)):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, one for each of {rows} rows, but they hold {len(documents)} "
                f"documents, and {self.name} runs with one document a row. Pass one for each document, in order."
            )
        return value

    # Laying back

    def _laid_back(self, output: Any, documents: Mapping[str, Documents], name: str = "") -> Any:
        """Outputs with a value for each token of (documents, longest), in the packed rows (B, T, ...)."""
        if isinstance(output, Mapping):
            for key, value in output.items():
                output[key] = self._laid_back(value, documents, key)  # type: ignore[index]
            return output
        if isinstance(output, (tuple, list)):
            return type(output)(self._laid_back(value, documents, name) for value in output)
        if not isinstance(output, Tensor) or name.endswith("attentions") or OF_OTHERS.fullmatch(name):
            return output
        side = "" if name.startswith("encoder_") else "decoder"
        found = documents.get(side) or next(iter(documents.values()))
        if name.startswith("encoder_") and "" not in documents:  # of images or sounds
            return output
        if output.shape[:2] == found.inside.shape and self._has_tokens(name, output):
            return found.lay_back(output)
        if output.shape[1:3] == found.inside.shape and output.ndim == 4:
            return torch.stack([found.lay_back(one) for one in output])
        if "router" in name and output.ndim == 2 and output.shape[0] == found.inside.numel():
            return found.lay_back(output.unflatten(0, found.inside.shape)).flatten(0, 1)
        return output

    def _has_tokens(self, name: str, value: Tensor) -> bool:
        """Whether an output whose shape is right for it has a value for each token."""
        if name == "logits" and value.ndim == 2:
            return self.name.endswith("ForPreTraining")  # of ELECTRA: one number a token
        if OF_DOCUMENTS.fullmatch(name) and (self.one_result or name != "logits"):
            return False
        return value.ndim > 2 or SCORES_OF_TOKENS.fullmatch(name) is not None or name == ""


def _tokens(arguments: Mapping[str, Any], *names: str) -> Tensor | None:
    return next((arguments[name] for name in names if isinstance(arguments.get(name), Tensor)), None)


def _is_of_tokens(name: str, value: Tensor, documents: Documents) -> bool:
    """Whether an argument has one value a token: (B, T, ...), (1, T, ...), or several kinds of positions (n, B, T)."""
    if OF_OTHERS.fullmatch(name) and not OF_TOKENS_AFTER_ALL.fullmatch(name):
        return False
    rows, length = documents.tokens
    shapes = ((rows, length), (1, length))
    return value.shape[:2] in shapes or ("position_ids" in name and value.shape[1:] in shapes)


def _cut(documents: Documents, value: Tensor, fill: int) -> Tensor:
    rows, length = documents.tokens
    if value.shape[:2] in ((rows, length), (1, length)):
        return documents.cut(value, fill=fill)
    return torch.stack([documents.cut(one, fill=fill) for one in value])


def _chosen(output: Any, keep: int | Tensor | None) -> Any:
    """Logits of the tokens that were asked for: the last so many of a row, or those at these places."""
    if keep is None or (isinstance(keep, int) and keep == 0) or not isinstance(output, Mapping):
        return output
    if isinstance(output.get("logits"), Tensor):
        output["logits"] = output["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]  # type: ignore[index]
    return output
