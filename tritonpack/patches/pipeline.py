"""The stages of a call of a patched model: call -> read -> compact -> run -> lay back -> output.

Inside of `SequenceParallel` one stage, `parallel/shard.py`, takes the place of `read` and `compact`. The model that
users call reads the documents from the arguments of its call, and passes them on as `attention_mask`. So it doesn't
matter which other arguments a head passes on, and a head that computes with the mask gets one of 0 and 1. A patched
module inside (`base_forward.py`) takes the documents from there, or reads them itself if it is called by itself. A call
is refused if the model has one result for a whole row and the row holds several documents.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.compact import lay_back_head
from tritonpack.patches.configurations import text_config
from tritonpack.patches.families import DOCUMENT_OUTPUTS, MEDIA_NAMES, ONE_DOCUMENT_A_ROW, ONE_LOGIT_A_TOKEN, TARGETS
from tritonpack.patches.forwards import comes_from
from tritonpack.patches.interface import NO_WEIGHTS
from tritonpack.patches.layers.positions import ROPE_INDEX, leave_positions_to_model
from tritonpack.patches.modules import holds
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parse_inputs import PACKING_ARGUMENTS, TREE, LazyMaskError, check_arguments, tokens_of
from tritonpack.patches.parts import Call, InstanceForward, PackingContext
from tritonpack.patches.placement import Documents, require_one_document_a_row
from tritonpack.patches.targets import SPANS, check_labels, check_padding_labels, shifts_labels, take_spans

if TYPE_CHECKING:
    from tritonpack.patches.proof import Proof

# The message, after the model's name, for packed rows in a model that gives one result for each row.
ONE_RESULT = (
    "gives one result for each row, so a row can't hold several documents. Pass padded rows, with one document in "
    "each; unpad=True leaves out their padding where the class can."
)

# Packages whose wrappers don't change labels and logits. TRL's head computes the loss itself.
HARMLESS = {"accelerate", "torch", "transformers"}


class Pipeline(InstanceForward):
    """The forward of a model that users may call: a head around a patched module, or that module itself.

    The forward is replaced, because PEFT calls it without its hooks.

    Attributes:
        base: the forward of the patched module inside.
        path: the name of the patched module in this model; empty if they are the same.
        known: the names of the arguments that this model and its patched module take.
        computes_each_token: whether this is a causal head whose class computes the logits of each token by itself.
        one_result: whether the model gives one result for each row.
        mixed_loss: why the model's own loss of packed documents is wrong, as a proof found; empty if it isn't.
        proof: proves that this model keeps documents apart; it sets `proven` and `trusted`, for rows and for trees.
        shard: the stage that divides batches among ranks inside of a `SequenceParallel`; else None.
    """

    mixed_loss = ""
    shard: Any = None
    proof: Proof
    proven: dict[bool, bool]
    trusted: dict[bool, bool]

    def __init__(self, module: PreTrainedModel, context: PackingContext, base: Any = None) -> None:
        super().__init__(module, context)
        self.base: Any = base or self  # a BaseForward
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.takes_cache, self.takes_mask = (takes_any or x in self.names for x in ("use_cache", "attention_mask"))
        self.unaccepted = [name for name in PACKING_ARGUMENTS if name == TREE or not (takes_any or name in self.names)]
        self.one_result = ONE_DOCUMENT_A_ROW.fullmatch(self.name) is not None
        self.has_choices = any(kind.__name__.endswith("ForMultipleChoice") for kind in type(module).__mro__)
        self.makes_positions = hasattr(module, ROPE_INDEX)
        self.takes_return_dict = takes_any or "return_dict" in self.names
        self.known = frozenset((*self.names, *self.base.names, *PACKING_ARGUMENTS))
        self.path = next(path for path, part in module.named_modules() if part is self.base.module)
        self.part_at_path = attrgetter(self.path)
        self.computes_each_token = self.path != "" and _computes_each_token(module, self.path.partition(".")[0])
        self.pad_token = getattr(text_config(module.config), "pad_token_id", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        proof = self.proof
        if not self.installed or (proof.bypassed_by is not None and proof.bypassed_by == threading.get_ident()):
            return self.inner(*args, **kwargs)
        inside = self.context.current.outer_batch is not None  # an outer call has read the documents
        arguments = dict(zip(self.positional, args, strict=False)) | kwargs
        if args and len(arguments) != len(args) + len(kwargs):
            raise ValueError(
                f"{self.name} got {len(args)} positional arguments. Its forward takes "
                f"{', '.join(self.positional) or 'none'}, each once. Pass the others by name."
            )
        run: Callable[[dict[str, Any]], Any] = self.run
        if self.shard is not None and not inside and self.shard.context.running:
            run = partial(self.shard, self)  # reads on all ranks before it raises on any
        else:
            if not inside:
                check_arguments(arguments, self.name, self.known)
            compiled = torch.compiler.is_compiling()
            if self.path and not compiled and self.part_at_path(self.module) is not self.base._module():
                self._require_part()
            if inside:
                packed_batch = self.base.read(arguments, self)
                if packed_batch is not None and self.one_result:
                    self.require_result_of_each(packed_batch)
                return self.run_packed(arguments, packed_batch)
            trees = proof.shares or arguments.get(TREE) is not None
            if compiled or not self.proven[trees]:
                proof.require(self, arguments, trees)
            if arguments.get("output_attentions") and self.base.serving.attention == "tritonpack":
                raise UnsupportedModelError(NO_WEIGHTS)
        return_dict = arguments.get("return_dict")  # PEFT passes None
        if not self.takes_return_dict or (self.module.config.return_dict if return_dict is None else return_dict):
            return run(arguments)
        output = run({**arguments, "return_dict": True})  # the stages need a mapping
        return output if isinstance(output, tuple) else output.to_tuple()

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run a user's call. The output is a mapping."""
        packed_batch = self.base.read(arguments, self)
        try:
            if packed_batch is None:
                return self.run_packed(arguments, None)
            if self.one_result:
                self.require_result_of_each(packed_batch)
            if arguments.get("labels") is not None:
                check_labels(self.module, arguments, packed_batch)
                if self.mixed_loss:
                    self.require_no_mixed_loss(packed_batch)
            add_loss = take_spans(arguments, packed_batch, self) if {*SPANS} & arguments.keys() else None
            row, within = packed_batch, arguments
            if self.base.compaction is not None:
                labels = arguments.get("shift_labels")
                labels = arguments.get("labels") if labels is None else labels
                if self._runs_on_rows(arguments, packed_batch, labels):  # then the base does, too
                    within, shifts = dict(arguments), shifts_labels(self.module, arguments)
                    row = self.base.compaction(packed_batch, within, shifts, labels)
                else:
                    check_padding_labels(self.module, arguments, packed_batch, refuse=True)
            output = self.run_packed(within, row)
        except (ValueError, RuntimeError, IndexError) as error:
            self._explain(error, arguments, packed_batch)
            raise
        if row is not packed_batch:
            loss = output.get("loss")
            trains = isinstance(loss, Tensor) and loss.requires_grad  # then no code reads the logits
            output = lay_back_head(output, row.row, trains and not _needs_logits(self.module))
        if not packed_batch.shared and not packed_batch.cached:
            self._require_nothing_of_rows(output, packed_batch, arguments)
        return output if add_loss is None else add_loss(output)

    def run_packed(self, arguments: dict[str, Any], packed_batch: PackedBatch | None) -> Any:
        """Run the model on a packed batch; on None if its masks are already made, or the model itself refuses the
        call."""
        if packed_batch is None:
            return self.inner(**arguments)
        for name in self.unaccepted:
            arguments.pop(name, None)
        if packed_batch.marks_documents and self.takes_mask:
            arguments["attention_mask"] = packed_batch
        if self.makes_positions:
            leave_positions_to_model(packed_batch, arguments)
        outer = self.context.current
        return self.context.run(Call(packed_batch, outer.running, outer.packed_batch), self.run_inner, **arguments)

    def _runs_on_rows(self, arguments: dict[str, Any], packed_batch: PackedBatch, labels: Any) -> bool:
        """Return whether this causal head is known to give the same logits and loss from one row of all tokens."""
        if not self.computes_each_token or torch.compiler.is_compiling() or all_modules._global_forward_hooks:
            return False
        part = self.module
        for name in self.path.split("."):
            part = getattr(part, name)
            if part._forward_hooks:  # a user's hooks must see the batch
                return False
        function, own = getattr(self.inner, "__func__", self.inner), type(self.module).forward
        if inspect.unwrap(function) is not inspect.unwrap(own) or not comes_from(function, HARMLESS):
            return False
        if "." in self.path and any(MEDIA_NAMES.fullmatch(name) and arguments[name] is not None for name in arguments):
            return False
        keep, (rows, length) = arguments.get("logits_to_keep"), packed_batch.tokens
        if isinstance(keep, Tensor) or (keep or 0) < 0:
            return False
        if labels is None:
            return True
        loss, shape = self.module.loss_function, (rows, min(keep or length, length))
        causal = getattr(loss, "__name__", "") == "ForCausalLMLoss" and loss.__module__.startswith("transformers.")
        fits = isinstance(labels, Tensor) and labels.shape == shape and labels.dtype == torch.int64
        return causal and fits and "ignore_index" not in arguments

    def _require_part(self) -> None:
        """Refuse a call if the patched module was replaced by another one that doesn't wrap it."""
        base = self.base._module()
        if base is None or not holds(self.part_at_path(self.module), base):
            raise UnsupportedModelError(
                f"{self.name} was patched with a {self.base.name} as its {self.path}, which was replaced since. The "
                "new one doesn't know where documents begin. Call tritonpack.unpatch(model), also on the model that "
                f"the new {self.path} comes from, put the parts together, and call tritonpack.patch(model)."
            )

    def require_result_of_each(self, packed_batch: PackedBatch) -> None:
        """Refuse packed rows in a model that gives one result for each row."""
        continued = packed_batch.cached and packed_batch.shape != packed_batch.tokens
        if not packed_batch.shared and not continued:
            require_one_document_a_row(packed_batch, f"{self.name} {ONE_RESULT}", in_graphs=True)

    def require_no_mixed_loss(self, packed_batch: PackedBatch) -> None:
        """Refuse labels of packed rows in a model whose own loss mixes documents."""
        require_one_document_a_row(
            packed_batch,
            f"{self.name} has a loss of its own, which isn't the loss of packed documents: on a few tokens "
            f"{self.mixed_loss}. Leave labels out and compute the loss of each document's outputs, or pass padded rows "
            "to the unpatched model.",
        )

    def _explain(self, error: Exception, arguments: dict[str, Any], packed_batch: PackedBatch | None) -> None:
        """Raise an error that names the arguments that probably made the call fail."""
        if torch.compiler.is_compiling():
            return
        _, tokens = tokens_of(arguments)
        known = (*PACKING_ARGUMENTS, *TARGETS, "input_ids", "inputs_embeds")
        shapes = {name: x.shape for name, x in arguments.items() if isinstance(x, Tensor) and name not in known}
        others = [name for name, shape in shapes.items() if shape[:2] != tokens[:2]]  # of images, for example
        appended = others if isinstance(error, LazyMaskError) else []
        if not appended and packed_batch is not None and not packed_batch.cached:
            labels, sizes_differ = arguments.get("labels"), "izes of tensors must match" in str(error)
            labelled = isinstance(labels, Tensor) and labels.ndim == 1 and not packed_batch.shared
            documents = Documents.of(packed_batch) if labelled or sizes_differ else None
            if documents is None:
                return
            count, rows = len(documents), packed_batch.tokens[0]
            if labelled and arguments["labels"].shape == (count,):
                raise ValueError(
                    f"{self.name} failed with labels of shape ({count},), one for each of {count} documents in {rows} "
                    "rows. It isn't known to give one result for each document. Pass padded rows, with one document in "
                    "each."
                ) from error
            if sizes_differ:
                appended = [name for name in others if shapes[name][:1] == (count,) != (rows,)]
        if appended:
            named = " and ".join(appended)
            raise ValueError(
                f"{self.name} appends {named} to its tokens, and a patched model doesn't know which document each "
                f"belongs to. Leave {named} out, or pass padded rows to the unpatched model."
            ) from error

    def _require_nothing_of_rows(self, output: Any, packed_batch: PackedBatch, arguments: dict[str, Any]) -> None:
        """Refuse an output with one value for each row if rows hold several documents."""
        rows, length = packed_batch.tokens
        keep = arguments.get("logits_to_keep")
        chosen = isinstance(keep, Tensor) or bool(keep)
        for name, value in output.items() if isinstance(output, dict) else ():
            if not isinstance(value, Tensor) or "loss" in name or value.shape[:1] != (rows,):
                continue
            of_tokens = value.shape == packed_batch.tokens and ONE_LOGIT_A_TOKEN.fullmatch(self.name) is not None
            if name == "logits" and (chosen or of_tokens):
                continue
            # Losses of tokens, such as in TRL's heads, may lack the last or the first token of a row.
            flat, short = value.ndim < 3, value.shape[1:2] not in ((length,), (length - 1,))
            if (flat or short) if DOCUMENT_OUTPUTS.fullmatch(name) else (flat and short):
                require_one_document_a_row(
                    packed_batch,
                    f"{self.name} returns {name} with one value for each row, not for each document. Pass padded rows, "
                    "with one document in each.",
                )


def _computes_each_token(head: PreTrainedModel, base: str) -> bool:
    """Return whether the class of a head computes the logits of each token by itself, and a loss of nothing else.

    A class that takes `logits_to_keep` computes each token by itself. It must not call parts of the base model, as
    OPT's head does.
    """
    code = getattr(inspect.unwrap(type(head).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return False
    # "logsumexp" means a second loss, of all logits.
    others = {"logsumexp", *dict(head.get_submodule(base).named_children())}
    return "logits_to_keep" in code.co_varnames and others.isdisjoint(code.co_names)


def _needs_logits(model: nn.Module) -> bool:
    """Return whether code around a model reads its logits right after the call: DDP with a static graph does, and FSDP2
    if it shards the weights of the head again."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    state = getattr(model, "_get_fsdp_state", None)
    group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
    resharded = state is not None and getattr(group, "post_forward_mesh_info", "unknown") is not None
    return resharded or (ddp is not None and ddp.static_graph)
