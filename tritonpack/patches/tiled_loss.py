"""The head and the loss of a causal model on tiles of rows, so that no tensor holds the logits of a whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from tritonpack.checks import describe, is_int
from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.head_alone import STATES, own_parameters, own_tensors, run_head
from tritonpack.patches.head_gradients import require_no_backward_hooks
from tritonpack.patches.head_targets import HeadTargets, computes_later, why_not_by_token
from tritonpack.patches.labels import IGNORED, takes_targets
from tritonpack.patches.packed_batch import PackedBatch
from tritonpack.patches.parts import InstanceForward, Part
from tritonpack.patches.placement import Placement
from tritonpack.patches.sums_of_losses import why_no_sum
from tritonpack.patches.tiles import Tiles, tiled_sum

REMEDY = "Patch it without tiled_loss."


class TiledLoss(Part):
    """The loss function of a model whose head and loss run on tiles. Other calls go to the model's own loss function.

    Attributes:
        path: the name of the base model in the model.
        rows: of a tile.
        own: the model's own loss function.
        checked: whether a call has seen that it is a sum over targets.
    """

    own: Any = None
    checked = False

    def __init__(self, head: PreTrainedModel, path: str, rows: int) -> None:
        super().__init__(head)
        self.path, self.rows = path, rows
        self._before: Any = None
        _require_known_head(head, path)

    def install(self) -> None:
        if not self.in_place:
            self.own, self._before = self.module.loss_function, self.module.__dict__.get("_loss_function")
            functools.update_wrapper(self, self.own, updated=())
            self.module.loss_function = self

    def remove(self) -> None:
        if self.in_place:
            del self.module.__dict__["_loss_function"]
            if self._before is not None:
                self.module.__dict__["_loss_function"] = self._before

    @property
    def in_place(self) -> bool:
        return self.module.__dict__.get("_loss_function") is self

    def __call__(self, logits: Tensor, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(labels, TiledTargets):
            return labels.loss_of(self.own, *args, **kwargs)
        return self.own(logits, labels, *args, **kwargs)

    def check(self, loss: Callable[[Tensor, Tensor, int], Tensor], logits: Tensor, ignored: int) -> None:
        """Refuse a loss function that tiles would change. This waits for the device, so it runs once.

        Args:
            loss: the own one as a function of logits, targets and their number.
            logits: of a tile.
            ignored: the target that counts as none.
        """
        why = why_no_sum(loss, logits, ignored)
        if why is not None:
            raise UnsupportedModelError(
                f"the loss function {_name_of(self.own)} of {type(self.module).__name__} isn't a sum over targets "
                f"divided by num_items_in_batch, so it can't be computed in tiles: {why}. Compute the sum over targets "
                "that aren't ignore_index (reduction='sum') and divide it by num_items_in_batch if that is given. "
                f"{REMEDY}"
            )
        self.checked = True

    def targets(self, arguments: Mapping[str, Any], packed_batch: PackedBatch, *, compacted: bool) -> TiledTargets:
        """The targets of a call with labels.

        Args:
            arguments: of the call.
            packed_batch: what the call says of its documents.
            compacted: whether the model may run on one row in place of the batch.

        Raises:
            ValueError: labels that aren't a tensor of integers, or a loss function that was replaced.
        """
        labels, shifted = arguments.get("labels"), arguments.get("shift_labels")
        given = labels if shifted is None else shifted
        if not isinstance(given, Tensor) or given.ndim != 2 or given.dtype != torch.int64:
            raise ValueError(
                f"with tiled_loss labels must be int64 numbers of tokens, (batch, length); got {describe(given)}."
            )
        loss = self.module.loss_function
        if self not in (loss, getattr(loss, "own", None)):  # in SequenceParallel a loss function holds this one
            raise ValueError(
                f"the loss function of {type(self.module).__name__} was replaced since this model was patched with "
                "tiled_loss. Set it first and patch the model then: call tritonpack.unpatch(model) and "
                "tritonpack.patch(model, tiled_loss=...)."
            )
        ignored = arguments.get("ignore_index", IGNORED)
        # The labels of one rank are shifted already.
        targets = given if shifted is not None or packed_batch.shared else pad(given[:, 1:], (0, 1), value=ignored)
        wanted = None
        if compacted and not packed_batch.shared and not packed_batch.cached:
            wanted = _in_batch(targets, packed_batch.tokens, arguments.get("logits_to_keep"), ignored)
        return TiledTargets(self, arguments, targets, wanted, shared=packed_batch.shared)


class TiledTargets(HeadTargets):
    """Takes the place of `labels` in a call. The loss function gets it, and computes the loss on tiles of states.

    The head itself runs on one row, whose logits nobody reads, so that it adds its other losses as before.

    Attributes:
        given: (B, K), the target of each token that has logits.
        wanted: (B, T), the same in the places of the batch; only if the model may run on one row in its place.
        keep: K by the call's `logits_to_keep`: how many of the last tokens, or which tokens. 0 for all.
        chosen: (M,), in the row, or in the flattened batch, the tokens that predict a label; None for all of `given`.
        labels: (M,), their labels.
        shared: whether the call is one rank's part of a batch.
    """

    narrow = True

    def __init__(
        self, loss: TiledLoss, call: Mapping[str, Any], given: Tensor, wanted: Tensor | None, *, shared: bool
    ) -> None:
        keep = call.get("logits_to_keep")
        super().__init__(given, given if wanted is None else wanted, 0 if keep is None else keep)
        self.tiled, self.placed = loss, wanted is not None
        self.chosen = None
        self.used, self.shared = False, shared
        left_out = ("labels", "shift_labels", "logits_to_keep", "num_items_in_batch", "ignore_index")
        self.call = {name: x for name, x in call.items() if name not in left_out}
        if "output_router_logits" in inspect.signature(type(loss.module).forward).parameters:
            self.call["output_router_logits"] = False

    def to_tensor(self) -> Tensor:
        raise UnsupportedModelError(
            f"{type(self.tiled.module).__name__} reads labels in a way that isn't known, so its loss can't be computed "
            f"in tiles. {REMEDY}"
        )

    def place(self, wanted: NDArray[Any], places: NDArray[Any], placement: Placement | None) -> None:
        predicting = (wanted != IGNORED).nonzero()[0]
        rows, labels = places[predicting], wanted[predicting]
        self._require_labels(predicting, rows, labels)
        self.chosen, self.labels = self._on_device(rows), self._on_device(labels)

    def take_states(self, output: Any, placement: Placement | None) -> Any:
        """What the base model gives the head: the states of one token, the rest laid back."""
        if not isinstance(output, Mapping) or STATES not in output:
            raise UnsupportedModelError(
                "with tiled_loss this model's base must give its states by name, as transformers' models do; got "
                f"{type(output).__name__}. {REMEDY}"
            )
        states = output[STATES]
        rest = {name: x for name, x in output.items() if name != STATES}
        if placement is not None:
            rest = {name: placement.lay_back_all(x, name) for name, x in rest.items()}
            states = states if self.chosen is not None else placement.lay_back(states)
            self.placement = None if self.chosen is None else placement
        self.states = states
        self.output = type(output)(**{STATES: states[:1, :1], **rest})
        return self.output

    @torch.compiler.disable(reason="the head and the loss run tile by tile here")
    def loss_of(self, own: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
        """The loss of all targets by the model's own loss function.

        Args:
            own: gives the sum over the targets divided by `num_items_in_batch`, here 1.
            args: for it, after logits and labels.
            num_items_in_batch: what to divide by; None for the number of targets.
            kwargs: for it.
        """
        self.used = True
        states, targets = self._predicting()
        targets = targets.to(states.device)
        count = (targets != kwargs.get("ignore_index", IGNORED)).sum()
        kwargs.pop("shift_labels", None)
        head, path = self.tiled.module, self.tiled.path.split(".")[0]

        def part(tile: Tensor, of_tile: Tensor) -> Tensor:
            logits = run_head(head, path, self.output, tile[None], self.call)
            if not self.tiled.checked and of_tile.numel():
                self.tiled.check(loss, logits, kwargs.get("ignore_index", IGNORED))
            return loss(logits, of_tile[None], 1)

        def loss(logits: Tensor, of_tile: Tensor, items: int) -> Tensor:
            return own(logits, of_tile, *args, num_items_in_batch=items, shift_labels=of_tile, **kwargs)

        parameters = list(own_tensors(head, getattr(head, path)))
        if torch.is_grad_enabled():
            _require_whole(head, getattr(head, path))
            require_no_backward_hooks(head, getattr(head, path), "tiled_loss")
        tiles = Tiles(part, targets, count > 0, self.tiled.rows, type(head).__name__)
        total = tiled_sum(tiles, states, parameters)
        items = count if num_items_in_batch is None else num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)

    def _predicting(self) -> tuple[Tensor, Tensor]:
        """The states that predict targets, (N, ...), and these targets, (N,)."""
        if self.chosen is not None:
            states = self.states.flatten(0, 1)
            # In the backward pass of `embedding` the gradients of a shared token add up in a fixed order.
            return embedding(self.chosen.to(states.device), states), self.labels
        keep = self.keep
        states = self.states[:, slice(-keep, None) if isinstance(keep, int) else keep]
        if states.shape[:2] != self.given.shape:
            raise ValueError(
                f"labels have shape {tuple(self.given.shape)}, and logits are computed for tokens of shape "
                f"{tuple(states.shape[:2])}. Both must be equal; logits_to_keep chooses tokens, not labels."
            )
        return states.flatten(0, 1), self.given.flatten()

    @property
    def kept(self) -> Any:
        return self.given.shape

    def finish(self, output: Any, head: nn.Module, path: str, arguments: Mapping[str, Any]) -> Any:
        """The head's output without logits. In evaluation logits are computed if they are read, as for metrics."""
        if not self.used:
            raise UnsupportedModelError(
                f"{type(self.tiled.module).__name__} computes its loss without its loss function, so it isn't tiled. "
                f"{REMEDY}"
            )
        reads = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or self.shared)
        if reads and computes_later(head, getattr(head, path.split(".")[0])):
            output["logits"] = self.later(output["logits"], head, path, arguments)
            return output
        return type(output)(**{name: x for name, x in output.items() if name != "logits"})


def _in_batch(targets: Tensor, tokens: torch.Size, keep: Any, ignored: int) -> Tensor | None:
    """Targets in the places of a batch, (B, T) with IGNORED elsewhere; None if their places aren't the last ones."""
    count = tokens[1] if keep is None or (is_int(keep) and keep == 0) else keep
    if not is_int(count) or targets.shape != (tokens[0], min(count, tokens[1])):
        return None
    wanted = targets.new_full(tokens, IGNORED)
    wanted[:, tokens[1] - targets.shape[1] :] = targets.masked_fill(targets == ignored, IGNORED)
    return wanted


def _name_of(loss: Any) -> str:
    return getattr(loss, "__name__", repr(loss))


def _require_known_head(head: PreTrainedModel, path: str) -> None:
    """Refuse a model whose head or loss isn't known to compute each token by itself.

    Raises:
        UnsupportedModelError: with the reason and the remedy.
    """
    name = type(head).__name__
    if not path:
        raise UnsupportedModelError(
            f"{name} has no head and computes no loss, so tiled_loss would do nothing. Patch the model with its head "
            "(AutoModelForCausalLM), or leave tiled_loss out."
        )
    forward = head.__dict__.get("forward")
    while isinstance(forward, InstanceForward):
        forward = forward.own
    why = why_not_by_token(head, forward or type(head).forward, head.get_submodule(path.split(".")[0]))
    if why is None and not takes_targets(head.loss_function):
        why = (
            f"its loss function {_name_of(head.loss_function)} doesn't take shift_labels and num_items_in_batch, as "
            "ForCausalLMLoss of transformers does"
        )
    if why is not None:
        raise UnsupportedModelError(f"the loss of {name} can't be computed in tiles: {why}. {REMEDY}")


def _require_whole(head: nn.Module, base: nn.Module) -> None:
    """Refuse weights of a head of which this rank holds a part."""
    for parameter in own_parameters(head, base):
        if hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id"):
            raise UnsupportedModelError(
                f"a weight of the head of {type(head).__name__}, {tuple(parameter.shape)}, is sharded by itself during "
                "the model's forward pass, and tiled_loss needs it whole. With FSDP2 shard it together with the model: "
                "fully_shard(layer) for each layer and fully_shard(model), but not the head. Otherwise patch the model "
                "without tiled_loss."
            )
