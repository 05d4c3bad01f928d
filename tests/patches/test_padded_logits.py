"""Logits of padded batches are laid back when they are read. Before, the head runs on tokens without padding."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import tritonpack
from tests.patches.calls import EXACT, call_of
from tests.patches.comparison import apart
from tests.patches.models import COMMON, VOCAB, tiny_model
from tests.patches.padded_batches import (
    BOTH_WAYS,
    FLOAT32,
    UNPAD,
    Batch,
    completions,
    padded_batch,
    real,
    results,
    unlabelled,
)


class Operators(TorchDispatchMode):
    """Notes operators that wait for a device, calls of `Tensor.cpu`, and the size of the largest tensor made."""

    WAITS = ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __enter__(self) -> Any:
        self.patch = pytest.MonkeyPatch()
        own = Tensor.cpu
        self.patch.setattr(Tensor, "cpu", lambda tensor: (self.waits.append("cpu"), own(tensor))[1])
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.waits += [name] if name in self.WAITS else []
        out = func(*args, **kwargs or {})
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


@BOTH_WAYS
def test_waits_for_the_device(options: dict[str, bool]) -> None:
    """Once, whatever the number of layers. A packed row waits for nothing more than without the option."""

    def waits(call: Batch, layers: int = 1, **options: bool) -> list[str]:
        model = tiny_model("llama", num_hidden_layers=layers)
        with tritonpack.patch(model, **options), torch.no_grad():
            model(**call)
            with Operators() as operators:
                model(**call)
        return operators.waits

    assert waits(unlabelled(), 1, **options) == waits(unlabelled(), 3, **options)
    assert waits(unlabelled(), **options).count("cpu") == 1
    assert waits(call_of(), **UNPAD) == waits(call_of())


@contextmanager
def rows_of_head(model: PreTrainedModel) -> Iterator[list[int]]:
    """On how many tokens the head runs, call by call."""
    counts: list[int] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: counts.append(args[0].shape[:-1].numel()))
    yield counts
    handle.remove()


def test_losses_that_are_not_transformers_own() -> None:
    """The head runs as in stock, whatever the loss reads. Labels of another shape fail as in stock."""
    model, batch = tiny_model("llama"), completions()
    with tritonpack.patch(model, unpad=True), pytest.raises(ValueError, match="batch_size"):
        model(**batch, logits_to_keep=3)
    model.loss_function = lambda logits, labels, **_: logits.square().mean() + labels.clamp(min=0).sum()
    with rows_of_head(model) as rows, tritonpack.patch(model, unpad=True):
        model(**batch)
    assert rows == [batch["input_ids"].numel()]


def through_a_tree(output: Any) -> Any:
    leaves, spec = tree_flatten(output)  # as DDP does
    return tree_unflatten(leaves, spec)


READ: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.logits,
    "getattr": lambda x: getattr(x, "logits"),  # noqa: B009
    "name": lambda x: x["logits"],
    "place": lambda x: x[1],
    "last place": lambda x: x[-1],
    "slice": lambda x: x[1:][0],
    "get": lambda x: x.get("logits"),
    "tuple": lambda x: x.to_tuple()[1],
    "dict": lambda x: {**x}["logits"],
    "values": lambda x: torch.stack([*x.values()][1:2])[0],
    "items": lambda x: dict(x.items())["logits"] * 1,
    "copy": lambda x: copy.copy(x).logits,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)).logits,
    "tree": lambda x: through_a_tree(x).logits,
}


@pytest.mark.parametrize("number", [0, 1], ids=["right", "left"])
def test_no_tensor_of_all_logits_is_made(number: int) -> None:
    model, batch = tiny_model("llama"), completions(number)
    limit = batch["input_ids"].numel() * VOCAB
    with tritonpack.patch(model, **UNPAD), Operators() as operators, rows_of_head(model) as rows:
        output, _ = results(model, batch)
        for look in (lambda x: x.loss, lambda x: x["loss"], lambda x: x[0], list, len, lambda x: [*x.items()]):
            look(output)
        through_a_tree(output)
        assert "logits" in output
        assert list(output) == ["loss", "logits"]
    assert operators.largest < limit
    before = int((batch["attention_mask"][:, 0] == 0).sum())  # a token of padding right before each document
    assert rows == [batch["attention_mask"].sum() + before]
    with Operators() as operators:
        results(model, batch)
    assert operators.largest >= limit


def test_every_way_to_read_them() -> None:
    model, batch = tiny_model("llama"), completions()
    want = model(**batch, return_dict=False)
    for way, take in READ.items():
        with tritonpack.patch(model, unpad=True):
            output = model(**batch)
            output.loss.backward(retain_graph=True)
            got = take(output)
        assert type(got) is Tensor, way
        assert isinstance(output, CausalLMOutputWithPast)
        assert (got.shape, got.dtype) == (want[1].shape, want[1].dtype), way
        assert apart([real(want[1], batch)], [real(got, batch)]) < EXACT, way
        assert output["logits"] is output[1] is output.logits
        output.logits = torch.zeros(1)
        assert torch.equal(output["logits"], torch.zeros(1))
    with tritonpack.patch(model, unpad=True):
        as_tuple = model(**batch, return_dict=False)
        with torch.no_grad():
            plain = model(**batch)
    assert type(vars(plain)["logits"]) is Tensor
    for loss, logits in (as_tuple, (plain.loss, plain.logits)):
        assert apart([want[0], real(want[1], batch)], [loss, real(logits, batch)]) < EXACT


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


def in_place(logits: Tensor) -> Tensor:
    logits[..., 0] = 0
    view = logits[:, 1:]
    view *= 2
    return logits.square()


# Losses of users.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "function": Square.apply,
    "in place": in_place,
    "reentrant": lambda x: checkpoint(torch.square, x, use_reentrant=True),
    "checkpoint": lambda x: checkpoint(torch.square, x, use_reentrant=False),
    "softmax": lambda x: x[:].float().log_softmax(-1),
}


@BOTH_WAYS
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_logits(name: str, options: dict[str, bool]) -> None:
    """Beside the model's own, as for distillation; of a head that holds its bias under two names, alone."""
    batch = completions()
    gradients = []
    for more in ({}, options):
        model = tiny_model("llama")
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("bert", **COMMON, is_decoder=True)
        bert = transformers.BertLMHeadModel(config).double().eval()
        model.lm_head.weight.register_hook(lambda gradient: gradient * 2)  # of a user
        for each in (model, bert):
            tritonpack.patch(each, **more)
            output = each(**batch)
            with torch.no_grad():
                assert (output.logits / 2).max() > 0  # read before, without gradients
            loss = real(LOSSES[name](output.logits), batch).mean()
            (loss + (output.loss if each is model else 0)).backward()
        gradients.append([p.grad for each in (model, bert) for p in each.parameters()])
    assert apart(*gradients) < FLOAT32


@BOTH_WAYS
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
def test_forward_hooks_of_the_base_model(options: dict[str, bool], later: bool) -> None:
    """They see the states of all tokens and may change them, wherever the model computes the loss or logits."""
    batch, outputs, shapes = padded_batch(0), [], []

    def double(module: Any, args: Any, output: Any) -> Any:
        shapes.append(output.last_hidden_state.shape[:2])
        output = copy.copy(output)
        output["last_hidden_state"] = output.last_hidden_state * 2
        return output

    for more in ({}, options):
        model = tiny_model("llama")
        for hook_first in (later, not later):
            model.model.register_forward_hook(double) if not hook_first else tritonpack.patch(model, **more)
        output, gradients = results(model, batch)
        outputs.append([output.loss.detach(), real(output.logits, batch).detach(), *gradients])
        assert len(model.model._forward_hooks) == 1
    assert apart(*outputs) < FLOAT32
    assert set(shapes) == {batch["input_ids"].shape}
