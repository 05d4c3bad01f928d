"""The forward of a model that users call, whose layers are patched.

Documents are read here from all arguments of the call. A call is refused if the model computes something of a whole row
and the row holds several documents.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.after_hooks import back_in_row, has_forward_hooks
from tritonpack.patches.call_arguments import (
    COUNTED,
    PACKING,
    TELLING,
    TREE,
    cache_of,
    in_form,
    is_paged,
    refuse_unmade_masks,
    tokens_of,
)
from tritonpack.patches.document_places import Documents, require_one_document_a_row
from tritonpack.patches.head_targets import HeadTargets, targets_of
from tritonpack.patches.hooks import PackingHook
from tritonpack.patches.labels import check_padding_labels, require_targets_of_trees, warn_of_first_labels
from tritonpack.patches.layers.image_positions import leave_positions_to
from tritonpack.patches.names import OF_DOCUMENTS, ONE_DOCUMENT_A_ROW, ONE_NUMBER_A_TOKEN, TARGETS
from tritonpack.patches.near_misses import refuse_near_misses
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.packing_context import PackingContext
from tritonpack.patches.pair_masks import is_pair_mask
from tritonpack.patches.parse_inputs import OpenMaskError, make_packed_batch
from tritonpack.patches.parts import InstanceForward
from tritonpack.patches.placement import Placement
from tritonpack.patches.proof import Proof
from tritonpack.patches.report import holds
from tritonpack.patches.spans import take_spans
from tritonpack.patches.tokens import text_config

# The refusal of packed rows in models that give one result for each row, after the model's name.
ONE_RESULT = (
    "gives one result for each row, so a row can't hold several documents. Pass padded rows, with one document in "
    "each; unpad=True leaves out their padding where the class can."
)


class ModelForward(InstanceForward):
    """The forward of a model that users call: of a head around a patched module, or of that module itself.

    The packing that is read here goes on as `attention_mask`. So nothing is lost in a head that passes on only some of
    its arguments, and a head that computes with the mask gets one of 0 and 1. PEFT calls a model's forward without its
    hooks, so the forward is replaced.

    Attributes:
        hook: the hook of the patched module.
        path: the name of the patched module in this one; empty if they are the same.
        known: the arguments that this model and its patched module take.
        one_result: whether the model gives one result for each row.
        mixed_loss: what a proof found wrong with the model's own loss of packed documents; empty if nothing.
        proof: what shows that this model keeps documents apart.
    """

    mixed_loss = ""
    proof: Proof

    def __init__(self, module: PreTrainedModel, context: PackingContext, hook: PackingHook) -> None:
        super().__init__(module, context)
        self.hook = hook
        parameters = inspect.signature(module.forward).parameters
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.one_result = ONE_DOCUMENT_A_ROW.fullmatch(self.name) is not None
        self.known = frozenset((*self.names, *hook.names, *PACKING))
        self.path = next(path for path, part in module.named_modules() if part is hook.module)
        self.part = type(hook.module).__name__

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, in the form in which they are read."""
        return in_form(super().bound(args, kwargs))

    def takes(self, argument: str) -> bool:
        return self.takes_any or argument in self.names

    @property
    def pad_token(self) -> int | None:
        return getattr(text_config(self.module.config), "pad_token_id", None)

    def require_in_place(self, arguments: dict[str, Any]) -> None:
        """Refuse a call whose result this forward must compute, if another forward has replaced it since."""
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
        if self.proof.passing is not None and self.proof.passing == threading.get_ident():
            return self.inner(*args, **kwargs)
        arguments = self.bound(args, kwargs)
        if not torch.compiler.is_compiling():
            self.require_parts()
        if is_paged(arguments.get("cache")):
            return self.inner(*args, **kwargs)
        if self.context.state.told is not None:  # inside of another head, which has read the documents
            return self.run(arguments)
        self.proof.require(self, arguments)
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

    def with_names(self, arguments: dict[str, Any]) -> Any:
        """Run a user's call with named outputs. If `return_dict` is false, the user gets a tuple."""
        wanted = arguments.get("return_dict")
        if wanted is None:  # PEFT passes None
            wanted = getattr(self.module.config, "return_dict", True)
        if wanted or not self.takes("return_dict"):
            return self.run(arguments)
        return self.run({**arguments, "return_dict": True}).to_tuple()

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run a call whose outputs have names."""
        self._require_one_document_a_choice(arguments)
        packed_batch = self._read(arguments)
        if packed_batch is None:
            return self._hand_on(self.inner(**arguments), None)
        output = self.with_loss(lambda: self._run_packed(arguments, packed_batch), arguments, packed_batch)
        return self._hand_on(output, packed_batch.placement)

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
        self.require_result_of_each(packed_batch)
        outermost = self.context.state.told is None
        if outermost:
            require_targets_of_trees(self.module, arguments, packed_batch)
            warn_of_first_labels(self.module, arguments, packed_batch)
            check_padding_labels(self.module, arguments, packed_batch)
        arguments = self._pass_on(packed_batch, arguments)
        targets = self._targets(arguments, packed_batch) if outermost else self.context.state.targets
        within = targets.within(arguments) if outermost and targets is not None else arguments
        try:
            with self.context.holding(told=packed_batch, targets=targets):
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
        if outermost and not packed_batch.shared and not packed_batch.cached:
            self._require_nothing_of_rows(output, packed_batch, arguments)
        return output

    def _targets(self, arguments: dict[str, Any], packed_batch: PackedBatch) -> HeadTargets | None:
        """The targets of a causal head around models that pass on the states of a module that makes one row."""
        if self.hook.compaction is None or torch.compiler.is_compiling() or not self.path:
            return None
        inside = [self.module.get_submodule(path) for path in accumulate(self.path.split("."), "{}.{}".format)]
        patched = {head.module for head in self.hook.heads}
        if not patched.issuperset(inside):
            return None
        return targets_of(self.module, self.inner, inside[0], arguments, packed_batch)

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

    def require_result_of_each(self, packed_batch: PackedBatch) -> None:
        """Refuse packed rows in a model that gives one result for each row."""
        continued = packed_batch.cached and packed_batch.shape != packed_batch.tokens
        if self.one_result and not packed_batch.shared and not continued:
            require_one_document_a_row(packed_batch, f"{self.name} {ONE_RESULT}", in_graphs=True)

    def _require_one_document_a_choice(self, arguments: dict[str, Any]) -> None:
        """Refuse packed rows in multiple choice, whose tokens are (B, choices, T)."""
        tokens, shape = tokens_of(arguments)
        if tokens is None or len(shape) != 3 or isinstance(arguments.get("attention_mask"), PackedBatch):
            return
        if not any(kind.__name__.endswith("ForMultipleChoice") for kind in type(self.module).__mro__):
            return  # columns of codebooks
        given = {name: x for name in (*TELLING, "input_ids") if isinstance(x := arguments.get(name), Tensor)}
        told = {name: x.flatten(0, 1) if x.shape == shape else x for name, x in given.items()}
        rows = torch.Size((shape[0] * shape[1], shape[2]))
        packed_batch = make_packed_batch(told, rows, tokens.device, self.hook.serving, self.pad_token)
        require_one_document_a_row(packed_batch, f"{self.name} {ONE_RESULT}", in_graphs=True)

    def _require_known_loss(self, arguments: Mapping[str, Any], packed_batch: PackedBatch) -> None:
        """Refuse labels of packed rows if the model's own loss mixes documents."""
        if self.mixed_loss and arguments.get("labels") is not None:
            require_one_document_a_row(
                packed_batch,
                f"{self.name} has a loss of its own, which isn't the loss of packed documents: on a few tokens "
                f"{self.mixed_loss}. Leave labels out and compute the loss of each document's outputs, or pass padded "
                "rows to the unpatched model.",
            )

    def with_loss(self, run: Callable[[], Any], arguments: dict[str, Any], packed_batch: PackedBatch | None) -> Any:
        """The output that `run` computes of a packed call. The loss of question answering is computed by document.

        Args:
            run: calls the model.
            arguments: the call's arguments; positions of spans are taken out of them.
            packed_batch: the packing of the tokens that have logits; None if no argument marks documents.
        """
        if packed_batch is None:
            return run()
        self._require_known_loss(arguments, packed_batch)
        spans = take_spans(arguments, packed_batch, self.module, self.own)
        output = run()
        return output if spans is None else spans.add_loss(output, self.name)

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
                f"known to give one result a document, and its rows hold {count} in {rows}. Pass padded rows, with one "
                "document in each."
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
                f"belongs to. Leave {named} out, or pass padded rows to the unpatched model."
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
                    f"{self.name} returns {name}, one for each row, whatever documents a row holds. Pass padded rows, "
                    "with one document in each.",
                )


def _beside_tokens(arguments: dict[str, Any]) -> list[str]:
    """The arguments that belong neither to tokens nor to documents, but to images, for example."""
    tokens, shape = tokens_of(arguments)
    left = (*PACKING, *TARGETS, "input_ids", "inputs_embeds")
    tensors = [name for name, x in arguments.items() if name not in left and isinstance(x, Tensor)]
    return [name for name in tensors if tokens is None or arguments[name].shape[:2] != shape[:2]]
