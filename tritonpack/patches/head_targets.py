"""The head of a causal model on the tokens that predict a label, and its logits for those who read them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, pad
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.after_hooks import AfterHooks
from tritonpack.patches.labels import IGNORED, predicts_own_tokens, shifts_labels
from tritonpack.patches.later_logits import STATES, Reading, own_parameters, with_logits
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.placement import WORTHWHILE, Placement
from tritonpack.patches.tensor_like import TensorLike

SHAPING = ("flatten", "to")  # beside those that `TensorLike` has

# Packages whose wrappers leave labels and logits as they are. TRL's head computes the loss itself.
HARMLESS = {"accelerate", "torch", "transformers"}


class HeadTargets(TensorLike):
    """Takes the place of `labels` in a call, and makes the head run on the tokens that predict a label.

    The base model gives the head the states of these tokens as a row of their own, each once. In the model's loss
    function, shifting and reshaping give this object back, and `cross_entropy` with it is `loss`. If the head runs on
    the caller's rows (`narrow` is False), this object stands for the tensor of labels. Labels on padding are refused in
    any case.

    Attributes:
        given: (B, K) int64, `labels` or `shift_labels` of the call.
        wanted: (B, T) int64, the label that each token predicts; `IGNORED` where it predicts none.
        keep: K, of how many last tokens in a row the caller wants logits.
        whole: whether the head runs on the caller's rows in any case, with the labels as they are.
        narrow: whether the head runs on other rows than the caller's.
        chosen: (S,) int64, on which tokens of the row, or of the flattened batch, the head runs; None for all.
        rows: (M,) int64, for each label the place, among the tokens that the head runs on, of the one that predicts it.
        labels: (M,) int64.
        placement: where the tokens of the batch lie in the row; None if the model ran on the batch as it is.
        states: (1, N, ...) or (B, T, ...), of all tokens that the model ran on.
        output: what the head got.
        hooks: what runs after forward hooks of users, which may change the states.
    """

    narrow = False
    chosen: Tensor | None
    rows: Tensor
    labels: Tensor
    placement: Placement | None = None
    states: Tensor
    output: Any = None

    def __init__(self, given: Tensor, wanted: Tensor, keep: int, *, whole: bool = False) -> None:
        self.given, self.wanted, self.keep, self.whole = given, wanted, keep, whole
        self.shape, self.dtype, self.device = given.shape, given.dtype, given.device
        self.hooks = AfterHooks()

    # As labels, in the loss function

    def to_tensor(self) -> Tensor:
        if self.narrow:
            raise UnsupportedModelError(
                "with unpad and share_prefixes the head of this model runs on a part of the tokens, and its loss "
                "function reads labels in a way that isn't known. Leave labels out, and compute the loss from logits."
            )
        return self.given

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: self) if self.narrow and name in SHAPING else super().__getattr__(name)

    def __getitem__(self, index: Any) -> Any:
        return self if self.narrow else super().__getitem__(index)

    def view(self, *shape: Any) -> Any:
        return self if self.narrow else super().view(*shape)

    reshape = view

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = next((x for x in args if isinstance(x, HeadTargets) and x.narrow), None)
        if ours is not None and function is pad:
            return ours
        if ours is not None and function is cross_entropy and args[1] is ours:
            return ours.loss(args[0], (kwargs or {})["reduction"])
        return super().__torch_function__(function, types, args, kwargs)

    def loss(self, logits: Tensor, reduction: str) -> Tensor:
        """The cross entropy of all labels by logits (S, vocabulary), as their sum or their mean."""
        assert reduction in ("sum", "mean"), reduction
        rows, labels = self.rows.to(logits.device), self.labels.to(logits.device)
        total = -log_softmax(logits, -1)[rows, labels].sum()
        return total if reduction == "sum" else total / self.labels.shape[0]

    # From the call to the base model, to the head, and back

    def within(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the model's own forward."""
        if self.whole:
            return arguments
        left_out = ("shift_labels", "logits_to_keep")
        return {**{name: x for name, x in arguments.items() if name not in left_out}, "labels": self}

    def place(self, wanted: NDArray[np.int64], places: NDArray[np.int64], placement: Placement | None) -> None:
        """Choose the tokens that the head runs on.

        Args:
            wanted: (B * T,), the values of `wanted`.
            places: (B * T,), where each token lies in the row, -1 if nowhere; without a row, in the flattened batch.
            placement: where tokens lie in the row; None if there is no row.

        Raises:
            ValueError: a label on padding, or a negative one.
        """
        predicting = (wanted != IGNORED).nonzero()[0]
        rows, labels = places[predicting], wanted[predicting]
        self._require_labels(predicting, rows, labels)
        if self.whole:
            return
        count, chosen = (len(places) if placement is None else len(placement.source)), None
        if torch.is_grad_enabled():
            used = np.zeros(count, dtype=bool)
            used[rows] = True
            chosen, rows = used.nonzero()[0], (np.cumsum(used) - 1)[rows]
            self.narrow = placement is not None or len(chosen) <= WORTHWHILE * count
        else:  # without gradients all logits fit, and programs that evaluate read them
            self.narrow = placement is not None
        self.placement = placement
        self.rows, self.labels = (self._on_device(x) for x in (rows, labels))
        self.chosen = None if chosen is None else self._on_device(chosen)

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.wanted.device, non_blocking=True)

    def _require_labels(
        self, predicting: NDArray[np.int64], rows: NDArray[np.int64], labels: NDArray[np.int64]
    ) -> None:
        bad = (labels < 0).nonzero()[0]
        if len(bad):
            raise ValueError(f"labels hold {labels[bad[0]]}; they must be ids of tokens, or {IGNORED} for no label.")
        lost = (rows < 0).nonzero()[0]
        if len(lost):
            row, column = divmod(int(predicting[lost[0]]), self.wanted.shape[1])
            raise ValueError(
                f"the label {labels[lost[0]]} in row {row} would be predicted at token {column}, which attention_mask "
                f"says is padding, and padding isn't computed. Set labels of padding to {IGNORED}, as collators of "
                "transformers do."
            )

    def take_states(self, output: Any, placement: Placement | None) -> Any:
        """What the base model gives the head: the states of the tokens that it runs on, the rest laid back."""
        if self.whole:
            return output if placement is None else placement.lay_back_all(output)
        if not isinstance(output, Mapping) or STATES not in output:
            raise UnsupportedModelError(
                "with unpad and share_prefixes this model's base must give its states by name, as transformers' "
                f"models do; got {type(output).__name__}. Leave labels out, and compute the loss from logits."
            )
        self.states = states = output[STATES]
        rest = {name: x for name, x in output.items() if name != STATES}
        if placement is not None:
            rest = {name: placement.lay_back_all(x, name) for name, x in rest.items()}
        if not self.narrow:
            states = states[:, -self.keep :]
        elif self.chosen is not None:
            states = states.flatten(0, 1).index_select(0, self.chosen.to(states.device))[None]
        self.output = type(output)(**{STATES: states, **rest})
        return self.output

    def finish(self, output: Any, head: nn.Module, path: str, arguments: Mapping[str, Any]) -> Any:
        """The head's output with the caller's logits, (B, K, vocabulary).

        Args:
            output: what the head gave.
            head: the model that the user called.
            path: the name of the patched module in it.
            arguments: of the head's call.
        """
        if not self.narrow:
            return output
        if self.chosen is None:
            assert self.placement is not None
            output["logits"] = self.placement.lay_back(output["logits"])[:, -self.keep :]
            return output
        kept = {name: x for name, x in arguments.items() if name not in ("labels", "shift_labels")}
        return with_logits(output, Reading(self, output["logits"], head, path.split(".")[0], kept))


def targets_of(
    head: PreTrainedModel, forward: Any, base: nn.Module, arguments: Mapping[str, Any], packed_batch: PackedBatch
) -> HeadTargets | None:
    """The targets of a call with labels of tokens; None if what predicts them isn't known.

    Args:
        head: the model that the user called.
        forward: its forward.
        base: the model in it that gives it its states.
        arguments: of the call.
        packed_batch: what the call says of its documents.
    """
    labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
    given = labels if shifted is None else shifted
    if not isinstance(labels, Tensor) or not isinstance(given, Tensor) or "ignore_index" in arguments:
        return None
    if packed_batch.cached or packed_batch.shared or packed_batch.shape != packed_batch.tokens:
        return None
    (rows, row_length), keep = packed_batch.tokens, arguments.get("logits_to_keep")
    if isinstance(keep, Tensor):
        return None
    keep = min(keep or row_length, row_length)
    if given.shape != (rows, keep) or given.dtype != torch.int64:
        return None
    wanted = given.new_full((rows, row_length), IGNORED, device=packed_batch.device)
    if shifted is not None or (predicts_own_tokens(head) and not shifts_labels(head, arguments)):
        wanted[:, row_length - keep :] = given
    elif shifts_labels(head, arguments):
        wanted[:, row_length - keep : -1] = given[:, 1:]
    else:
        return None
    return HeadTargets(given, wanted, keep, whole=not _runs_on_targets(head, forward, base))


def _runs_on_targets(head: PreTrainedModel, forward: Any, base: nn.Module) -> bool:
    """Whether a head gives the same loss from the tokens alone that predict a label."""
    loss = head.loss_function
    causal = getattr(loss, "__name__", "") == "ForCausalLMLoss" and loss.__module__.startswith("transformers.")
    if not causal or not _computes_each_token(head, forward, base):
        return False
    return not torch.is_grad_enabled() or _computes_later(head, base)


def _computes_each_token(head: PreTrainedModel, forward: Any, base: nn.Module) -> bool:
    """Whether a head is known to compute the logits of each token by itself, and one loss of them.

    Its forward must be transformers' own. It computes each token by itself because it takes `logits_to_keep`; its loss
    reads nothing else, and it doesn't reach into the base model, as OPT's does, which calls a part of it.
    """
    own, function = inspect.unwrap(type(head).forward), getattr(forward, "__func__", forward)
    if not set(_packages(function)) <= HARMLESS or inspect.unwrap(function) is not own:
        return False
    code, parts = own.__code__, {name for name, _ in base.named_children()}
    if "loss_function" not in code.co_names or "logsumexp" in code.co_names:  # or another loss of all logits
        return False
    return "logits_to_keep" in code.co_varnames and parts.isdisjoint(code.co_names)


def _packages(forward: Any) -> Iterator[str]:
    """The packages of the code that runs in a forward: of each of its wrappers, and its own."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        home = getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__)
        yield home.partition(".")[0]
        forward = getattr(forward, "__wrapped__", None)


def _computes_later(head: nn.Module, base: nn.Module) -> bool:
    """Whether logits computed later are the same: layers of torch and transformers alone, without state or dropout.

    And nothing that wraps the model may need them in the call: DDP with a static graph watches the tensors of the first
    output, and FSDP2 may shard the head's weights again right after the call.
    """
    for _, module in head.named_modules(memo={base}):
        if not type(module).__module__.startswith(("torch.nn.", "transformers.")) and module is not head:
            return False
        if isinstance(module, nn.Dropout) and module.training and module.p:
            return False
    if any(type(parameter) is not nn.Parameter for parameter in own_parameters(head, base)):
        return False
    ddp = DistributedDataParallel._get_active_ddp_module()
    state = getattr(head, "_get_fsdp_state", None)
    group = getattr(state(), "_fsdp_param_group", None) if state is not None else None
    resharded = state is not None and getattr(group, "post_forward_mesh_info", "unknown") is not None
    return not resharded and not (ddp is not None and ddp.static_graph)
