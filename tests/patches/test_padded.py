"""Padded batches that run as one row, without padding and with common beginnings once: outputs, losses, gradients.

The head runs on tokens without padding, and logits are laid back when they are read. test_sweep.py tries every causal
class in all layouts; patches that come and go are in test_lifecycle.py.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

import tritonpack
from tests.patches import padded_batches as batches
from tests.patches import zoo
from tests.patches.calls import EXACT, call_of, documents
from tests.patches.models import VOCAB, tiny_model
from tests.patches.padded_batches import BOTH_WAYS, SHARE, UNPAD, WAYS, Batch, completions, padded_batch, real, step
from tests.patches.zoo import apart


def unlabelled() -> Batch:
    return {name: x for name, x in padded_batch().items() if name != "labels"}


def classes(batch: Batch) -> Tensor:
    """A label for each token, in place of labels of a language model."""
    return (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)


def label_on_padding() -> Batch:
    """Such as a token for the end that the mask leaves out: the last token of the document predicts it."""
    batch = completions()
    ends = batch["attention_mask"].sum(1)
    batch["labels"][1, ends[1]], batch["labels"][3, ends[3]] = 7, 8
    return batch


# A model, and what makes a call.
CASES: dict[str, tuple[str, Callable[[], Batch]]] = {
    "completions on the right": ("llama", lambda: completions() | {"output_hidden_states": True}),
    "completions on the left": ("llama", lambda: completions(1)),
    "a tensor of items": ("llama", lambda: completions() | {"num_items_in_batch": torch.tensor(100)}),
    "a number of items": ("llama", lambda: completions() | {"num_items_in_batch": 7}),
    "shifted labels": ("llama", lambda: (x := completions()) | {"shift_labels": x["labels"].roll(-1, 1)}),
    "positions": (
        "llama", lambda: (x := completions(1)) | {"position_ids": (x["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    ),
    "a label on padding": ("llama", label_on_padding),
    "routers": ("mixtral", lambda: padded_batch() | {"output_router_logits": True}),
    "scores of rows": (
        "LlamaForSequenceClassification/llama", lambda: (x := padded_batch()) | {"labels": classes(x)[:, 0]}
    ),
    "scores of tokens": ("LlamaForTokenClassification/llama", lambda: (x := padded_batch()) | {"labels": classes(x)}),
    "masked tokens": ("BertForMaskedLM/bert", lambda: (x := padded_batch()) | {"labels": classes(x)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls(name: str) -> None:
    """All outputs and gradients are stock's, and no padding was computed but where a label is predicted from it."""
    spec, make = CASES[name]
    for options in (UNPAD, SHARE)[: 1 if "Masked" in spec else 2]:
        more = {"num_labels": 3} if "Class" in spec else {"is_decoder": False} if "Masked" in spec else {}
        model, batch = zoo.build(spec, **more), make()
        want = step(model, batch)
        with tritonpack.patch(model, **options) as handle:
            batches.require_equal(want, step(model, batch))
        batches.require_saved(handle.saved, batch, options=options, padding=2 * (name == "a label on padding"))


@BOTH_WAYS
@pytest.mark.parametrize("keep", [4, 40, -3, torch.tensor([2, 5, 6])], ids=str)
def test_logits_to_keep(keep: Any, options: dict[str, bool]) -> None:
    model, batch, found = tiny_model("llama"), padded_batch(1), []
    places = slice(-keep, None) if isinstance(keep, int) else keep
    batch["labels"] = batch["labels"][:, places]
    mask = batch["attention_mask"][:, places, None]
    for patched in (False, True):
        if patched:
            tritonpack.patch(model, **options)
        model.zero_grad()
        output = model(**batch, logits_to_keep=keep)
        output.loss.backward()
        found.append([output.loss.detach(), output.logits.detach() * mask, *batches.gradients_of(model).values()])
    assert apart(*found) < EXACT


@BOTH_WAYS
def test_what_stays_as_it_is(options: dict[str, bool]) -> None:
    """Embeddings can't be compared exactly, so padding alone is removed. Rows beyond the limit of rotary embeddings
    run as they are: stock chooses frequencies by the padded length. Calls that ask for a cache return it."""
    model, batch = tiny_model("llama"), unlabelled()
    want = real(model(**batch).logits, batch)
    call = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach()}
    with tritonpack.patch(model, **options) as handle:
        assert apart([want], [real(model(**call, attention_mask=batch["attention_mask"]).logits, batch)]) < EXACT
        batches.require_saved(handle.saved, batch, options=UNPAD)
        asked = model(**batch, use_cache=True)
        assert asked.past_key_values.get_seq_length() == asked.logits.shape[1]
        assert model(**batch).past_key_values is None
    for limit in (16, 6):
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=limit)
        want = real(model(**batch).logits, batch)
        with tritonpack.patch(model, **options) as handle:
            assert apart([want], [real(model(**batch).logits, batch)]) < EXACT
        assert (handle.saved.tokens_computed < handle.saved.tokens_given) == (limit == 16)


def test_what_is_shared() -> None:
    """Equal rows run once. Documents that have only their first token in common, or other positions, share nothing.
    Where there is nothing to save, the call stays as it is."""
    model, (ids,) = tiny_model("llama"), documents((9,))
    rows, mask = torch.cat(documents((30, 30, 30))), torch.ones(3, 30, dtype=torch.long)
    rows[:, 0], mask[0, 20:] = 1, 0
    places = torch.arange(9).expand(4, -1) + torch.arange(4)[:, None]
    for call, computed in (
        ({"input_ids": ids.expand(4, -1)}, 9),
        ({"input_ids": rows, "attention_mask": mask}, 80),
        ({"input_ids": ids.expand(4, -1), "position_ids": places}, 36),
        ({"input_ids": rows}, 90),
        ({"input_ids": rows, "attention_mask": torch.ones_like(rows)}, 90),
    ):
        with tritonpack.patch(model):
            want = model(**call).logits
        with tritonpack.patch(model, share_prefixes=True) as handle:
            got = model(**call)
        assert handle.saved.tokens_computed == computed
        assert computed == 80 or apart([want], [got.logits]) < EXACT
        assert (got.past_key_values is not None) == (computed in (36, 90))
    assert str(handle.saved) == "90 of 90 tokens computed, 0.0% saved"


@BOTH_WAYS
def test_labels_at_the_edges(options: dict[str, bool]) -> None:
    """No label at all; and labels of first tokens behind padding, which are predicted from the padding before them, as
    without the options. Stock's padding sees other tokens, so a patched model is the standard."""
    model, batch = tiny_model("llama"), padded_batch(0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with tritonpack.patch(model, **options):
        assert model(**batch).loss.isnan()
        got = step(model, batch, num_items_in_batch=5)
    assert got.values["loss"] == 0
    assert not any(grad.any() for grad in got.gradients.values() if grad is not None)
    batch = padded_batch(1)
    first = (batch["attention_mask"].diff(dim=1) == 1).nonzero() + torch.tensor([0, 1])
    batch["labels"][tuple(first.T)] = batch["input_ids"][tuple(first.T)]
    with tritonpack.patch(model):
        want = step(model, batch)
    with tritonpack.patch(model, **options):
        batches.require_equal(want, step(model, batch))


@WAYS
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant: bool, options: dict[str, bool]) -> None:
    """Of layers of a batch after the forward pass of another; and of the whole model, which removes padding again."""
    model, given, runs = batches.training_model("mistral"), [padded_batch(number) for number in (0, 1)], []
    embeddings = model.get_input_embeddings()(given[0]["input_ids"]).detach()

    def gradient() -> Tensor:
        x = embeddings.clone().requires_grad_()
        told = {name: given[0][name] for name in ("attention_mask", "labels")}
        checkpoint(lambda x: model(inputs_embeds=x, **told).loss, x, use_reentrant=reentrant).backward()
        return x.grad

    def gradients() -> list[Any]:
        model.zero_grad()
        for loss in [batches.OBJECTIVES["both"](model(**batch), batch) for batch in given]:
            loss.backward()
        return [*batches.gradients_of(model).values()]

    of_whole, want = gradient(), gradients()
    with tritonpack.patch(model, **options):
        assert apart([of_whole], [gradient()]) < EXACT
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
        assert apart(want, gradients()) < EXACT
    assert len(runs) == 4  # each batch forward and again


def prepared(model: Any, **options: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options).prepare_model(model)


@WAYS
@pytest.mark.parametrize("by", ["autocast", "accelerate"])
def test_mixed_precision(by: str, options: dict[str, bool]) -> None:
    """accelerate runs the forward under autocast, and converts every output to float32, logits when they are read."""
    batch, found = padded_batch(0), []
    for patched in (False, True):
        model = batches.training_model(dtype=torch.float32)
        handle = tritonpack.patch(model, **options) if patched else None
        called = prepared(model, mixed_precision="bf16") if by == "accelerate" else model
        with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
            found.append(step(called, batch, "both"))
            assert called(**batch).logits.dtype == (torch.bfloat16 if by == "autocast" else torch.float32)
    batches.require_as_exact(step(batches.training_model(), batch, "both"), *found)
    assert handle is not None
    batches.require_saved(handle.saved, batch, batch, options=options)
    if by == "accelerate":
        prepared(model)


# Logits, which are laid back when they are read


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


def rows_of_head(model: Any) -> list[int]:
    """On how many tokens the head runs, call by call."""
    counts: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: counts.append(args[0].shape[:-1].numel()))
    return counts


def test_losses_that_are_not_transformers_own() -> None:
    """The head runs as in stock, whatever the loss reads. Labels of another shape fail as in stock."""
    model, batch = tiny_model("llama"), completions()
    with tritonpack.patch(model, unpad=True), pytest.raises(ValueError, match="batch_size"):
        model(**batch, logits_to_keep=3)
    model.loss_function = lambda logits, labels, **_: logits.square().mean() + labels.clamp(min=0).sum()
    with tritonpack.patch(model, unpad=True) as handle:
        handle.prove()
        rows = rows_of_head(model)
        model(**batch)
    assert rows == [batch["input_ids"].numel()]


def through_a_tree(output: Any) -> Any:
    leaves, spec = tree_flatten(output)  # as DDP does
    return tree_unflatten(leaves, spec)


READ: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.logits,
    "name": lambda x: x["logits"],
    "slice": lambda x: x[1:][0],
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
    rows = rows_of_head(model)
    with tritonpack.patch(model, **UNPAD), Operators() as operators:
        output = model(**batch)
        output.loss.backward()
        for look in (lambda x: x.loss, lambda x: x["loss"], lambda x: x[0], list, len, lambda x: [*x.items()]):
            look(output)
        through_a_tree(output)
        assert "logits" in output
        assert list(output) == ["loss", "logits"]
    assert operators.largest < batch["input_ids"].numel() * VOCAB
    before = int((batch["attention_mask"][:, 0] == 0).sum())  # a token of padding right before each document
    assert rows == [batch["attention_mask"].sum() + before]


def test_every_way_to_read_them() -> None:
    model, batch = tiny_model("llama"), completions()
    want = model(**batch, return_dict=False)
    with tritonpack.patch(model, unpad=True):
        for way, take in READ.items():
            output = model(**batch)
            output.loss.backward(retain_graph=True)
            got = take(output)
            assert (type(got), got.shape, got.dtype) == (Tensor, want[1].shape, want[1].dtype), way
            assert isinstance(output, CausalLMOutputWithPast)
            assert apart([real(want[1], batch)], [real(got, batch)]) < EXACT, way
            assert output["logits"] is output[1] is output.logits
            output.logits = torch.zeros(1)
            assert torch.equal(output["logits"], torch.zeros(1))
        as_tuple = model(**batch, return_dict=False)
        with torch.no_grad():
            plain = model(**batch)
    assert type(vars(plain)["logits"]) is Tensor
    for loss, logits in (as_tuple, (plain.loss, plain.logits)):
        assert apart([want[0], real(want[1], batch)], [loss, real(logits, batch)]) < EXACT


# Losses of users.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: (x[..., 0].zero_(), x[:, 1:].mul_(2), x.square())[2],
    "reentrant": lambda x: checkpoint(torch.square, x, use_reentrant=True),
    "softmax": lambda x: x[:].float().log_softmax(-1),
    "operators": lambda x: abs(1 - 2 / (x / 3 + 5)) ** 2 + x % 0.5 + (x.detach() // 7),
}


@BOTH_WAYS
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_logits(name: str, options: dict[str, bool]) -> None:
    """Beside the model's own, as for distillation; of a head that holds its bias under two names, alone."""
    batch, gradients = completions(), []
    for more in ({}, options):
        model = tiny_model("llama")
        bert = zoo.build("bert")
        model.lm_head.weight.register_hook(lambda gradient: gradient * 2)  # of a user
        for each in (model, bert):
            tritonpack.patch(each, **more)
            output = each(**batch)
            with torch.no_grad():
                assert (output.logits / 2).max() > 0  # read before, without gradients
            loss = real(LOSSES[name](output.logits), batch).mean()
            (loss + (output.loss if each is model else 0)).backward()
        gradients.append([p.grad for each in (model, bert) for p in each.parameters()])
    assert apart(*gradients) < 8 * EXACT  # transformers' causal loss is in float32


@BOTH_WAYS
@pytest.mark.parametrize("hook_first", [False, True])
def test_forward_hooks_of_the_base_model(options: dict[str, bool], hook_first: bool) -> None:
    """They see the states of all tokens and may change them, wherever the model computes the loss or logits."""
    batch, found, shapes = padded_batch(0), [], []

    def double(module: Any, args: Any, output: Any) -> Any:
        shapes.append(output.last_hidden_state.shape[:2])
        output = copy.copy(output)
        output["last_hidden_state"] = output.last_hidden_state * 2
        return output

    for more in ({}, options):
        model = tiny_model("llama")
        for hooks in (hook_first, not hook_first):
            model.model.register_forward_hook(double) if hooks else tritonpack.patch(model, **more)
        found.append(step(model, batch))
        assert len(model.model._forward_hooks) == 1
    batches.require_equal(*found)
    assert set(shapes) == {batch["input_ids"].shape}
