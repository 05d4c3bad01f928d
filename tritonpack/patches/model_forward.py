"""The forward of a model that users call, whose layers are patched.

Documents are read here from all arguments of the call. A call is refused if the model computes something of a whole row
and the row holds several documents.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.after_hooks import back_in_row, has_forward_hooks
from tritonpack.patches.call_arguments import COUNTED, PACKING, TREE, cache_of, is_paged, refuse_unmade_masks, tokens_of
from tritonpack.patches.foreign_modules import foreign_modules, kept_apart
from tritonpack.patches.head_targets import HeadTargets, targets_of
from tritonpack.patches.hooks import PackingHook
from tritonpack.patches.labels import check_padding_labels, require_targets_of_trees, warn_of_first_labels
from tritonpack.patches.layers.image_positions import leave_positions_to
from tritonpack.patches.near_misses import refuse_near_misses
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.pair_masks import is_pair_mask
from tritonpack.patches.parse_inputs import OpenMaskError
from tritonpack.patches.placement import Placement
from tritonpack.patches.report import holds
from tritonpack.patches.tiled_loss import TiledLoss
from tritonpack.patches.unpacking.choices import Choices
from tritonpack.patches.unpacking.document_places import Documents, require_one_document_a_row
from tritonpack.patches.unpacking.names import OF_DOCUMENTS, ONE_NUMBER_A_TOKEN, TARGETS
from tritonpack.patches.unpacking.unpacking_forward import UnpackingForward


class ModelForward(UnpackingForward):
    """The forward of a model that users call: of a head around a patched module, or of that module itself.

    The packing that is read here goes on as `attention_mask`. So nothing is lost in a head that passes on only some of
    its arguments, and a head that computes with the mask gets one of 0 and 1. PEFT calls a model's forward without its
    hooks, so the forward is replaced.

    Attributes:
        hook: the hook of the patched module.
        path: the name of the patched module in this one; empty if they are the same.
        known: the arguments that this model and its patched module take.
        seen: whether a packed call has checked the code of others in this model.
        pads_left: whether documents in rows of their own are padded on the left.
        tiled: the tiled loss of this model; None unless `patch` was asked for it.
    """

    tiled: TiledLoss | None = None

    def __init__(self, module: PreTrainedModel, context: PackingContext, hook: PackingHook) -> None:
        super().__init__(module, context)
        self.hook = hook
        self.seen = False
        self.takes_use_cache = self.takes("use_cache")
        self.known = frozenset((*self.names, *hook.names, *PACKING))
        self.path = next(path for path, part in module.named_modules() if part is hook.module)
        self.part = type(hook.module).__name__
        self.pads_left = not self.summaries.isdisjoint({"last", "cls_index"})

    def require_in_place(self, arguments: dict[str, Any]) -> None:
        """Refuse a call whose result this forward must compute, if another forward has replaced it since."""
        if self.tiled is not None and not self.in_place:
            raise ValueError(
                f"the forward of {self.name} was replaced since this model was patched, so its loss isn't computed in "
                "tiles. If the new forward never makes all logits, as Liger-Kernel's and TRL's don't, patch the model "
                "without tiled_loss. Otherwise call tritonpack.unpatch(model), replace it, and patch the model then."
            )
        if (self.one_result or arguments.get("output_router_logits")) and not self.in_place:
            raise ValueError(
                f"the forward of {self.name} was replaced since this model was patched, so what it computes of whole "
                "rows would mix documents. Replace it first and patch the model then: call tritonpack.unpatch(model) "
                "and tritonpack.patch(model)."
            )

    def require_parts(self) -> None:
        """Refuse a call if the patched module was replaced since. It may be wrapped."""
        part = self.module
        for name in self.path.split(".") if self.path else ():
            part = getattr(part, name, None)
        if self.hook.gone or (part is not self.hook.module and not holds(self.module, self.hook.module)):
            raise UnsupportedModelError(
                f"{self.name} was patched with a {self.part} as its {self.path}, which was replaced since, and nothing "
                "tells the new one where documents begin. Call tritonpack.unpatch(model), also on the model that the "
                f"new {self.path} comes from, put the parts together, and patch the whole with tritonpack.patch(model)."
            )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bound(args, kwargs)
        if not torch.compiler.is_compiling():
            self.require_parts()
        if is_paged(arguments.get("cache")):
            return self.inner(*args, **kwargs)
        if self.context.state.told is not None:  # inside of another head, which has read the documents
            return self.run(arguments)
        refuse_near_misses(arguments, self.known, self.name)
        refuse_unmade_masks(arguments)
        if arguments.get("output_attentions") and self.hook.serving.attention == "tritonpack":
            raise UnsupportedModelError(
                "output_attentions=True: tritonpack's attention has no weights; unpatch the model."
            )
        if torch.compiler.is_compiling():
            return self.with_names(arguments)
        try:
            return self.with_names(arguments)
        except OpenMaskError as error:
            self._refuse_appended(_beside_tokens(arguments), error)
            raise

    def run(self, arguments: dict[str, Any]) -> Any:
        choices = Choices.of(arguments, self.module, self.hook.serving, left=self.pads_left)
        if choices is not None:
            self._require_tokens(arguments)
            return self.run_choices(choices, arguments)
        packed_batch = self._read(arguments)
        if self.tiled is not None:
            self._require_tiles(arguments, packed_batch)
        if packed_batch is None:
            return self._hand_on(self.inner(**arguments), None)
        output = self.with_loss(lambda: self._run_packed(arguments, packed_batch), arguments, packed_batch)
        return self._hand_on(output, packed_batch.placement)

    def _require_tiles(self, arguments: dict[str, Any], packed_batch: PackedBatch | None) -> None:
        """Refuse a call that would make all logits in training, and a call with labels that can't be tiled."""
        if arguments.get("labels") is None:
            if self.module.training and torch.is_grad_enabled():
                raise ValueError(
                    f"{self.name} was patched with tiled_loss and is trained without labels, so it would make the "
                    "logits of all tokens. Pass labels. If the loss needs logits, as Trainer's label_smoothing_factor "
                    "and compute_loss_func do, patch the model without tiled_loss."
                )
        elif packed_batch is None:
            raise ValueError(
                "with tiled_loss a call with labels takes tokens (batch, length), and a two-dimensional attention_mask "
                "or none. Patch the model without tiled_loss for other calls."
            )

    def _hand_on(self, output: Any, placement: Placement | None) -> Any:
        """An output for the head around this model, or for the user: in the shape of the batch that was given."""
        targets = self.context.state.targets
        patched = self.module is self.hook.module
        hooked = targets is not None and not targets.whole and has_forward_hooks(self.module)
        if patched and targets is not None and not hooked:
            return targets.take_states(output, placement)
        if patched and placement is not None:
            output = placement.lay_back_all(output)
        if patched and targets is not None:
            targets.hooks.call(self.module, lambda x: targets.take_states(back_in_row(x, placement), placement))
        elif targets is not None:  # between the head and the patched module
            targets.output = output
        return output

    def _run_packed(self, arguments: dict[str, Any], packed_batch: PackedBatch) -> Any:
        if self.one_result and not packed_batch.shared and (documents := self._documents(packed_batch)) is not None:
            self._require_tokens(arguments)
            return self.run_by_document({"": documents}, arguments)
        outermost = self.context.state.told is None
        if outermost:
            require_targets_of_trees(self.module, arguments, packed_batch)
            warn_of_first_labels(self.module, arguments, packed_batch)
            check_padding_labels(self.module, arguments, packed_batch)
        arguments = self._pass_on(packed_batch, arguments)
        targets = self._targets(arguments, packed_batch) if outermost else self.context.state.targets
        within = targets.within(arguments) if outermost and targets is not None else arguments
        first = (outermost or packed_batch.placement is not None) and self._is_first(packed_batch)
        try:
            watch = kept_apart(self.module, packed_batch) if first else nullcontext()
            with self.context.holding(told=packed_batch, targets=targets), watch:
                output = self.inner(**within)
            if outermost and targets is not None:
                targets.hooks.require_run()
        except (ValueError, RuntimeError, IndexError) as error:
            if outermost:
                self._explain(error, arguments, packed_batch)
            raise
        finally:
            if outermost and targets is not None:
                targets.hooks.end()
        if outermost and targets is not None:
            output = targets.finish(output, self.module, self.path, arguments)
        if packed_batch.counted and isinstance(output, dict) and (cache := cache_of(output)) is not None:
            setattr(cache, COUNTED, True)
        if first:
            self.seen = True
        if outermost and not packed_batch.shared and not packed_batch.cached:
            self._require_nothing_of_rows(output, packed_batch, arguments)
        return output

    def _targets(self, arguments: dict[str, Any], packed_batch: PackedBatch) -> HeadTargets | None:
        """The targets of a causal head around models that pass on the states of a module that makes one row."""
        if self.tiled is not None:
            compacted = self.hook.compaction is not None
            return (
                None
                if arguments.get("labels") is None
                else self.tiled.targets(arguments, packed_batch, compacted=compacted)
            )
        if self.hook.compaction is None or torch.compiler.is_compiling() or not self.path:
            return None
        inside = [self.module.get_submodule(path) for path in accumulate(self.path.split("."), "{}.{}".format)]
        patched = {head.module for head in self.hook.heads}
        if not patched.issuperset(inside):
            return None
        return targets_of(self.module, self.inner, inside[0], arguments, packed_batch)

    def _is_first(self, packed_batch: PackedBatch) -> bool:
        """Whether a call is the first one with several documents in a row, and the model holds code of others."""
        if torch.compiler.is_compiling() or self.seen or packed_batch.shared or packed_batch.cached:
            return False
        if not packed_batch.tells_documents or not _has_several(packed_batch):
            return False  # code of others may still be put in before the first packed call
        self.seen = not foreign_modules(self.module)
        return not self.seen

    def _read(self, arguments: dict[str, Any]) -> PackedBatch | None:
        """The packing of a call; None if its masks are made already, or if its rows are not two-dimensional."""
        mask = arguments.get("attention_mask")
        if isinstance(mask, PackedBatch):
            return mask
        if len(tokens_of(arguments)[1]) == 3:  # each row is a choice that holds one document
            return None
        # Beside a cache a mask of pairs is generate()'s, which the hook has claimed.
        pairs = is_pair_mask(mask) and cache_of(arguments) is None
        if mask is not None and not pairs and (not isinstance(mask, Tensor) or mask.ndim != 2):
            return None
        if self.module is not self.hook.module:
            return self.hook.read(arguments)
        arguments.update(self.hook.run(self.module, (), arguments)[1])  # this forward may be called without its hook
        mask = arguments.get("attention_mask")
        return mask if isinstance(mask, PackedBatch) else None

    def _pass_on(self, packed_batch: PackedBatch, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the model's own forward."""
        arguments = {name: x for name, x in arguments.items() if name not in PACKING or self.takes(name)}
        arguments.pop(TREE, None)  # nothing but `make_packed_batch` reads it
        if packed_batch.tells_documents and self.takes("attention_mask"):
            arguments["attention_mask"] = packed_batch
        leave_positions_to(self.module, packed_batch, arguments)
        return arguments

    def _documents(self, packed_batch: PackedBatch) -> Documents | None:
        """The documents that get rows of their own; None if each has one already."""
        if not packed_batch.cached:
            return Documents.of(packed_batch, left=self.pads_left)
        if packed_batch.shape == packed_batch.tokens:
            require_one_document_a_row(
                packed_batch,
                f"{self.name} gives one result a document, and packed rows can't use a cache for that. Leave "
                "the cache out.",
            )
        return None

    def _require_tokens(self, arguments: dict[str, Any]) -> None:
        """Refuse a call in which the end of a document can't be found."""
        if arguments.get("input_ids") is None:
            raise ValueError(
                f"{self.name} gives one result a document and finds the end of each by its tokens; pass packed rows as "
                "input_ids instead of inputs_embeds."
            )
        if self.pad_token is None:
            raise ValueError(
                f"{self.name} gives one result a document and tells documents from padding by config.pad_token_id, "
                "which is None. Set it to the tokenizer's."
            )

    def run_rows(self, arguments: dict[str, Any]) -> Any:
        if "mean" in self.summaries and arguments.get("attention_mask") is not None:
            raise ValueError(
                f"{self.name} averages all tokens of a row, padding included (summary_type is 'mean'), so documents of "
                "different lengths can't be scored in one batch. Give documents of one length, or set summary_type to "
                "'first' or 'last' and build the model anew."
            )
        with self.context.holding(told=None):
            if self.module is self.hook.module:  # whose forward is called without its hook
                arguments = self.hook.run(self.module, (), arguments)[1]
            return self.inner(**arguments)

    def _explain(self, error: Exception, arguments: dict[str, Any], packed_batch: PackedBatch) -> None:
        """Raise an error that names the argument by which a packed call has probably failed."""
        if torch.compiler.is_compiling() or packed_batch.cached:
            return
        labels, sizes_differ = arguments.get("labels"), "izes of tensors must match" in str(error)
        labelled = isinstance(labels, Tensor) and labels.ndim == 1 and not packed_batch.shared
        if not (labelled or sizes_differ) or (documents := Documents.of(packed_batch)) is None:
            return
        count, rows = len(documents), packed_batch.tokens[0]
        if labelled and arguments["labels"].shape == (count,):
            raise ValueError(
                f"{self.name} failed with labels of shape ({count},), one for each of {count} documents: it isn't "
                f"known to give one result a document, and its rows hold {count} in {rows}. Give each document a row "
                "of its own."
            ) from error
        names = [n for n in _beside_tokens(arguments) if arguments[n].shape[:1] == (count,) != (rows,)]
        if sizes_differ:
            self._refuse_appended(names, error)

    def _refuse_appended(self, names: list[str], error: Exception) -> None:
        """Raise an error that names the arguments that the model appends to its tokens, if there are any."""
        if names:
            named = " and ".join(names)
            raise ValueError(
                f"{self.name} appends {named} to its tokens, and a patched model can't tell which document each "
                f"belongs to. Leave {named} out, or unpatch the model and give each document a row of its own."
            ) from error

    def _require_nothing_of_rows(self, output: Any, packed_batch: PackedBatch, arguments: dict[str, Any]) -> None:
        """Refuse an output that has one value for each row, if rows hold several documents."""
        rows, length = packed_batch.tokens
        keep = arguments.get("logits_to_keep")
        chosen = isinstance(keep, Tensor) or bool(keep)
        for name, value in output.items() if isinstance(output, dict) else ():
            if not isinstance(value, Tensor) or "loss" in name or value.shape[:1] != (rows,):
                continue
            of_tokens = value.shape == packed_batch.tokens and ONE_NUMBER_A_TOKEN.fullmatch(self.name) is not None
            if name == "logits" and (chosen or of_tokens):
                continue
            # Losses of tokens, such as those of TRL's heads, may lack the last or the first token of a row.
            flat, short = value.ndim < 3, value.shape[1:2] not in ((length,), (length - 1,))
            if (flat or short) if OF_DOCUMENTS.fullmatch(name) else (flat and short):
                require_one_document_a_row(
                    packed_batch,
                    f"{self.name} returns {name}, one for each row, whatever documents a row holds. Give each document "
                    "a row of its own.",
                )


def _beside_tokens(arguments: dict[str, Any]) -> list[str]:
    """The arguments that belong neither to tokens nor to documents, but to images, for example."""
    tokens, shape = tokens_of(arguments)
    left = (*PACKING, *TARGETS, "input_ids", "inputs_embeds")
    tensors = [name for name, x in arguments.items() if name not in left and isinstance(x, Tensor)]
    return [name for name in tensors if tokens is None or arguments[name].shape[:2] != shape[:2]]


def _has_several(packed_batch: PackedBatch) -> bool:
    """Whether a row is known to hold several documents."""
    if packed_batch.tree_ends is not None:
        return True
    try:
        return Documents.of(packed_batch) is not None
    except ValueError:  # DistilBERT's multiple choice gives its encoder positions of choices, for rows of documents
        return False
