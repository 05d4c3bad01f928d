"""Padded batches that run as one row, without padding and with common beginnings once: outputs, losses, gradients."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertLMHeadModel,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, alone, call_of, documents
from tests.patches.comparison import apart, tolerance
from tests.patches.models import COMMON, VOCAB, generate, tiny_model
from tests.patches.padded_batches import BOTH_WAYS, UNPAD, padded_batch, require_saved

FLOAT32 = tolerance(torch.float32)  # transformers' causal loss is in float32


def completions(number: int = 0) -> dict[str, Tensor]:
    """A batch in which only the last two tokens of each document have labels."""
    batch = padded_batch(number)
    mask = batch["attention_mask"]
    last = (mask.flip(1).cumsum(1).flip(1) <= 2) & mask.bool()
    return {**batch, "labels": batch["input_ids"].masked_fill(~last, -100)}


def unlabelled(number: int = 0) -> dict[str, Tensor]:
    return {name: x for name, x in padded_batch(number).items() if name != "labels"}


def results(model: PreTrainedModel, batch: dict[str, Any], **more: Any) -> tuple[Any, list[Tensor | None]]:
    """The output of a call, and the gradients of its loss, or of its first output where tokens aren't padding."""
    model.zero_grad()
    output = model(**batch, **more)
    target = output.loss if "labels" in batch else real(output[0], batch).square().sum()
    target.backward()
    return output, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def real(values: Tensor, batch: dict[str, Any]) -> Tensor:
    """Values (B, T, ...), or (B * T, ...) as routers give them, with zeros for padding; other values unchanged."""
    mask = batch["attention_mask"][..., None]
    if values.ndim == 3:
        return values * mask[:, -values.shape[1] :]
    return values * mask.flatten(0, 1) if values.shape[:1] == (mask.numel(),) else values


def require_as_stock(
    model: PreTrainedModel, batch: dict[str, Any], options: dict[str, bool], limit: float = EXACT, padding: int = 0,
    **more: Any,
) -> None:  # fmt: skip
    """All outputs and gradients of a call in the patched model are stock's, and so much padding was computed."""
    want, gradients = results(model, batch, **more)
    with tritonpack.patch(model, **options) as handle:
        got, found = results(model, batch, **more)
        require_saved(handle.saved, batch, options=options, padding=padding)
    assert apart(gradients, found) < limit
    for name in (name for name in want if name not in ("past_key_values", "cache")):
        ones, others = ([x[name]] if isinstance(x[name], Tensor) else list(x[name]) for x in (want, got))
        assert apart([real(x, batch) for x in ones], [real(x, batch) for x in others]) < limit, name


def shifted(batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)


# Arguments beside a batch.
MORE: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "nothing": lambda batch: {},
    "hidden states": lambda batch: {"output_hidden_states": True},
    "a tensor of items": lambda batch: {"num_items_in_batch": torch.tensor(100)},
    "a number of items": lambda batch: {"num_items_in_batch": 7},
    "an output asked for": lambda batch: {"return_dict": True},
    "shifted labels": lambda batch: {"shift_labels": shifted(batch)},
    "positions": lambda batch: {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)},
}


class TestCalls:
    @BOTH_WAYS
    @pytest.mark.parametrize("number", [0, 1], ids=["right", "left"])
    @pytest.mark.parametrize("more", MORE)
    def test_causal_models(self, more: str, number: int, options: dict[str, bool]) -> None:
        for batch in (padded_batch(number), completions(number)):
            require_as_stock(tiny_model("llama"), batch, options, **MORE[more](batch))
        require_as_stock(tiny_model("mistral"), unlabelled(number), options)

    @BOTH_WAYS
    @pytest.mark.parametrize("keep", [4, 9, 40, torch.tensor([2, 5, 6])], ids=str)
    def test_logits_to_keep(self, keep: Any, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), padded_batch(1)
        places = slice(-keep, None) if isinstance(keep, int) else keep
        batch["labels"] = batch["labels"][:, places]
        want, gradients = results(model, batch, logits_to_keep=keep)
        with tritonpack.patch(model, **options):
            got, found = results(model, batch, logits_to_keep=keep)
        mask = batch["attention_mask"][:, places, None]
        assert apart([want.loss.detach(), want.logits * mask], [got.loss.detach(), got.logits * mask]) < EXACT
        assert apart(gradients, found) < EXACT

    @BOTH_WAYS
    def test_router_loss_of_experts(self, options: dict[str, bool]) -> None:
        model = tiny_model("mixtral", router_aux_loss_coef=0.5)
        require_as_stock(model, padded_batch(0), options, output_router_logits=True)

    @BOTH_WAYS
    @pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "gemma3_text", "mamba2", "qwen3_next"])
    @pytest.mark.fast("gpt2-share", "gpt_oss-unpad", "mamba2-unpad")
    def test_other_families(self, name: str, options: dict[str, bool]) -> None:
        model = zoo.tiny_model(name, dtype=torch.float64)
        if options == UNPAD or name.startswith("g"):
            require_as_stock(model, {**completions(), "use_cache": False}, options, FLOAT32)

    @BOTH_WAYS
    @pytest.mark.parametrize("head", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
    def test_other_heads(self, head: Any, options: dict[str, bool]) -> None:
        torch.manual_seed(0)
        model = head.from_config(AutoConfig.for_model("llama", **COMMON, num_labels=3)).double().eval()
        batch = padded_batch(0)
        by_row = head is AutoModelForSequenceClassification
        labels = (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)
        require_as_stock(model, {**batch, "labels": labels[:, 0] if by_row else labels}, options)

    @BOTH_WAYS
    def test_embeddings_in_place_of_tokens(self, options: dict[str, bool]) -> None:
        """Embeddings can't be compared exactly, so padding alone is removed."""
        model, batch = tiny_model("llama"), unlabelled()
        embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
        call = {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]}
        want = real(model(**call).logits, batch)
        with tritonpack.patch(model, **options) as handle:
            assert apart([want], [real(model(**call).logits, batch)]) < EXACT
        require_saved(handle.saved, batch, options=UNPAD)

    @BOTH_WAYS
    def test_packed_rows_beside_padding(self, options: dict[str, bool]) -> None:
        model, pieces = tiny_model("llama"), documents()
        want = alone(model, pieces, gradients=False).values
        batch = call_of("two_rows_padded", pieces)
        with tritonpack.patch(model, **options) as handle:
            got = model(**batch).logits
        assert apart([want], [torch.cat([got[0, :7], got[1, :15]])]) < EXACT
        assert handle.saved.tokens_computed == 22

    @BOTH_WAYS
    def test_rotary_embeddings_that_change_with_long_rows(self, options: dict[str, bool]) -> None:
        """Rows beyond the limit run as they are: stock chooses frequencies by the padded length."""
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        for limit in (16, 6):
            model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=limit)
            want = real(model(**unlabelled()).logits, unlabelled())
            with tritonpack.patch(model, **options) as handle:
                assert apart([want], [real(model(**unlabelled()).logits, unlabelled())]) < EXACT
            assert (handle.saved.tokens_computed < handle.saved.tokens_given) == (limit == 16)

    def test_what_is_shared(self) -> None:
        """Equal rows run once. Documents that have only their first token in common, or other positions, share
        nothing. Where there is nothing to save, the call stays as it is."""
        model, (ids,) = tiny_model("llama"), documents((9,))
        want = model(ids.expand(4, -1)).logits
        with tritonpack.patch(model, share_prefixes=True) as handle:
            assert apart([want], [model(ids.expand(4, -1)).logits]) < EXACT
        assert (handle.saved.tokens_given, handle.saved.tokens_computed) == (36, 9)
        rows, mask = torch.cat(documents((30, 30, 30))), torch.ones(3, 30, dtype=torch.long)
        rows[:, 0], mask[0, 20:] = 1, 0
        places = torch.arange(9).expand(4, -1) + torch.arange(4)[:, None]
        for call, computed in (
            ({"input_ids": rows, "attention_mask": mask}, 80),
            ({"input_ids": ids.expand(4, -1), "position_ids": places}, 36),
        ):
            with tritonpack.patch(model, share_prefixes=True) as handle:
                model(**call)
            assert handle.saved.tokens_computed == computed
        for call in ({"input_ids": rows}, {"input_ids": rows, "attention_mask": torch.ones_like(rows)}):
            with tritonpack.patch(model):
                want = model(**call)
            with tritonpack.patch(model, share_prefixes=True) as handle:
                got = model(**call)
            assert torch.equal(want.logits, got.logits)
            assert got.past_key_values is not None
            assert str(handle.saved) == "90 of 90 tokens computed, 0.0% saved"

    @BOTH_WAYS
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_generate(self, cache: str, options: dict[str, bool]) -> None:
        model, ids = tiny_model("mistral"), torch.cat(documents((9, 9)))
        want, _ = generate(model, ids, cache=cache, padding=4)
        with tritonpack.patch(model, **options):
            got, _ = generate(model, ids, cache=cache, padding=4)
            asked = model(**unlabelled(), use_cache=True)
            assert asked.past_key_values.get_seq_length() == asked.logits.shape[1]
            assert model(**unlabelled()).past_key_values is None
        assert torch.equal(want, got)

    @BOTH_WAYS
    def test_waits_for_the_device(self, options: dict[str, bool]) -> None:
        """Once, whatever the number of layers. A packed row waits for nothing more than without the option."""

        def waits(call: dict[str, Any], layers: int = 1, **options: bool) -> list[str]:
            model = tiny_model("llama", num_hidden_layers=layers)
            with tritonpack.patch(model, **options), torch.no_grad():
                model(**call)
                with _Waits() as waits:
                    model(**call)
            return waits.names

        assert waits(unlabelled(), 1, **options) == waits(unlabelled(), 3, **options)
        assert waits(unlabelled(), **options).count("cpu") == 1
        assert waits(call_of(), **UNPAD) == waits(call_of())


class _Waits(TorchDispatchMode):
    """Counts operators that wait for a device, and calls of `Tensor.cpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Any:
        self.patch = pytest.MonkeyPatch()
        own = Tensor.cpu
        self.patch.setattr(Tensor, "cpu", lambda tensor: (self.names.append("cpu"), own(tensor))[1])
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.patch.undo()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name in ("nonzero", "_local_scalar_dense", "item", "equal", "masked_select", "unique"):
            self.names.append(name)
        return func(*args, **kwargs or {})


class TestLabels:
    @BOTH_WAYS
    def test_no_label_at_all(self, options: dict[str, bool]) -> None:
        model, batch = tiny_model("llama"), padded_batch(0)
        batch["labels"] = torch.full_like(batch["labels"], -100)
        with tritonpack.patch(model, **options):
            assert model(**batch).loss.isnan()
            loss = model(**batch, num_items_in_batch=5).loss
            loss.backward()
        assert loss == 0
        assert not any(p.grad.any() for p in model.parameters())

    @BOTH_WAYS
    def test_a_label_on_the_first_padding(self, options: dict[str, bool]) -> None:
        """Such as a token for the end that the mask leaves out: the last token of the document predicts it."""
        batch = completions()
        ends = batch["attention_mask"].sum(1)
        batch["labels"][1, ends[1]], batch["labels"][3, ends[3]] = 7, 8
        require_as_stock(tiny_model("llama"), batch, options, padding=2)

    @BOTH_WAYS
    def test_a_label_of_the_first_token_behind_padding(self, options: dict[str, bool]) -> None:
        """It is predicted from the padding before it, as without the options. Stock's padding sees other tokens, so a
        patched model is the standard."""
        model, batch = tiny_model("llama"), padded_batch(1)
        first = (batch["attention_mask"].diff(dim=1) == 1).nonzero() + torch.tensor([0, 1])
        batch["labels"][tuple(first.T)] = batch["input_ids"][tuple(first.T)]
        with tritonpack.patch(model):
            want, gradients = results(model, batch)
        with tritonpack.patch(model, **options):
            got, found = results(model, batch)
        assert apart([want.loss.detach(), *gradients], [got.loss.detach(), *found]) < EXACT

    @pytest.mark.parametrize("head", [AutoModelForMaskedLM, AutoModelForTokenClassification])
    def test_labels_of_padding_itself_are_refused(self, head: Any) -> None:
        """Where each token predicts its own label."""
        torch.manual_seed(0)
        kind = "bert" if head is AutoModelForMaskedLM else "llama"
        settings = {"num_labels": VOCAB} if kind == "llama" else {}
        model, batch = (
            head.from_config(AutoConfig.for_model(kind, **COMMON, **settings)).double().eval(),
            padded_batch(0),
        )
        require_as_stock(model, batch, UNPAD)
        with tritonpack.patch(model, unpad=True):
            with pytest.raises(ValueError, match="the label 0 in row 0 is predicted at token 9"):
                model(**{**batch, "labels": batch["input_ids"]})
            model(**batch)  # goes on after an error

    def test_losses_that_are_not_transformers_own(self) -> None:
        """The head runs as in stock, whatever the loss reads. Labels of another shape fail as in stock."""
        model, batch = tiny_model("llama"), completions()
        with tritonpack.patch(model, unpad=True), pytest.raises(ValueError, match="batch_size"):
            model(**batch, logits_to_keep=3)
        model.loss_function = lambda logits, labels, **_: logits.square().mean() + labels.clamp(min=0).sum()
        with rows_of_head(model) as rows, tritonpack.patch(model, unpad=True):
            model(**batch)
        assert rows == [batch["input_ids"].numel()]


@contextmanager
def rows_of_head(model: PreTrainedModel) -> Iterator[list[int]]:
    """On how many tokens the head runs, call by call."""
    counts: list[int] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: counts.append(args[0].shape[:-1].numel()))
    yield counts
    handle.remove()


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


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
    "float": lambda x: x.float() ** 2,
    "softmax": lambda x: x[:].log_softmax(-1),
    "view": lambda x: x.view(len(x), -1, 2).flip(-1).view(x.shape) * x,
}


class TestLogits:
    """Logits are laid back when they are read. Before, the head runs on tokens without padding."""

    @pytest.mark.parametrize("number", [0, 1], ids=["right", "left"])
    def test_no_tensor_of_all_logits_is_made(self, number: int) -> None:
        model, batch = tiny_model("llama"), completions(number)
        limit = batch["input_ids"].numel() * VOCAB
        with tritonpack.patch(model, **UNPAD), _Largest() as largest, rows_of_head(model) as rows:
            output, _ = results(model, batch)
            for read in (lambda x: x.loss, lambda x: x["loss"], lambda x: x[0], list, len, lambda x: [*x.items()]):
                read(output)
            through_a_tree(output)
            assert "logits" in output
            assert list(output) == ["loss", "logits"]
        assert largest.numel < limit
        before = int((batch["attention_mask"][:, 0] == 0).sum())  # a token of padding right before each document
        assert rows == [batch["attention_mask"].sum() + before]
        with _Largest() as largest:
            results(model, batch)
        assert largest.numel >= limit

    @pytest.mark.parametrize("way", READ)
    def test_every_way_to_read_them(self, way: str) -> None:
        model, batch = tiny_model("llama"), completions()
        want = model(**batch).logits
        tritonpack.patch(model, unpad=True)
        output = model(**batch)
        output.loss.backward(retain_graph=True)
        got = READ[way](output)
        assert type(got) is Tensor
        assert isinstance(output, CausalLMOutputWithPast)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        tritonpack.unpatch(model)
        assert apart([real(want, batch)], [real(got, batch)]) < EXACT
        assert output["logits"] is output[1] is output.logits
        output.logits = torch.zeros(1)
        assert torch.equal(output["logits"], torch.zeros(1))

    def test_evaluation_and_tuples_have_plain_logits(self) -> None:
        model, batch = tiny_model("llama"), completions()
        want = model(**batch, return_dict=False)
        with tritonpack.patch(model, unpad=True):
            got = model(**batch, return_dict=False)
            with torch.no_grad():
                plain = model(**batch)
        assert type(vars(plain)["logits"]) is Tensor
        for loss, logits in (got, (plain.loss, plain.logits)):
            assert apart([want[0], real(want[1], batch)], [loss, real(logits, batch)]) < EXACT

    @BOTH_WAYS
    @pytest.mark.parametrize("name", LOSSES)
    def test_losses_of_logits(self, name: str, options: dict[str, bool]) -> None:
        """Beside the model's own, as for distillation; of a head that holds its bias under two names, alone."""
        batch = completions()
        gradients = []
        for more in ({}, options):
            model = tiny_model("llama")
            torch.manual_seed(0)
            bert = BertLMHeadModel(AutoConfig.for_model("bert", **COMMON, is_decoder=True)).double().eval()
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


class TestUserHooks:
    @BOTH_WAYS
    @pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
    def test_forward_hooks_of_the_base_model(self, options: dict[str, bool], later: bool) -> None:
        """They see the states of all tokens and may change them, wherever the model computes the loss or logits."""
        batch, outputs, shapes = padded_batch(0), [], []

        def double(module: Any, args: Any, output: Any) -> Any:
            shapes.append(output.last_hidden_state.shape[:2])
            output = copy.copy(output)
            output["last_hidden_state"] = output.last_hidden_state * 2
            return output

        for more in ({}, options):
            model = tiny_model("llama")
            for step in (later, not later):
                model.model.register_forward_hook(double) if not step else tritonpack.patch(model, **more)
            output, gradients = results(model, batch)
            outputs.append([output.loss.detach(), real(output.logits, batch).detach(), *gradients])
            assert len(model.model._forward_hooks) == 1
        assert apart(*outputs) < FLOAT32
        assert set(shapes) == {batch["input_ids"].shape}

    def test_a_hook_of_the_base_model_that_fails(self) -> None:
        model = tiny_model("llama")

        def fail(*_: Any) -> None:
            raise KeyError("of a user")

        with tritonpack.patch(model, unpad=True):
            handle = model.model.register_forward_hook(fail)
            with pytest.raises(KeyError, match="of a user"):
                model(**padded_batch(0))
            handle.remove()
            assert not model.model._forward_hooks
            model(**padded_batch(0))
