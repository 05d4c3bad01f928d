"""A model that isn't known to be exact is proven in its first call, on itself: leaking ones are refused.

foreign.py has the table of models and of what other libraries do to them.
"""

import contextlib
import copy
import pickle
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, MixtralForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

import tritonpack
from tests.patches import foreign, zoo
from tests.patches.calls import LENGTHS, call_of, documents, in_threads
from tests.patches.foreign import CASES, DTYPES, Convolution, Mixing, Unshown, config, spread_out, with_loss
from tests.patches.models import VOCAB, Graphs, tiny_model
from tritonpack import UnsupportedModelError
from tritonpack.patches import forwards, proof

IDS = torch.ones(1, 4, dtype=torch.long)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast(
    *(f"{name}-{DTYPES[i % 3]}-{i % 2 > 0}" for i, name in enumerate(CASES) if "states" not in name),
    "an encoder's states-torch.float32-False", "an encoder's states, mixed-torch.bfloat16-True",
)  # fmt: skip
def test_leaks_are_refused_and_nothing_else(
    name: str, dtype: torch.dtype, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is replaced after the patch: until the first call it is found."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().to(dtype)
    for step in (after, not after):
        if step:
            handle = tritonpack.patch(model, **case.options)
        else:
            case.change(model, monkeypatch)
    if not case.words:
        handle.prove()
    for _ in range(2 if case.words else 0):  # it isn't forgotten
        with pytest.raises(UnsupportedModelError, match=f"(?s){case.words}"):
            handle.prove()


# When and how a model is proven: in its first call, without a trace, inside of whatever wraps it


def refused(kind: Any, words: str = "don't stay apart") -> Any:
    """A context in which a call of a leaking class is refused, and a call of another class isn't."""
    return pytest.raises(UnsupportedModelError, match=words) if kind is Mixing else contextlib.nullcontext()


def test_a_known_class_is_trusted_at_once(tries: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that FSDP's fully_shard made a subclass of, with layers that torch quantizes, and without weights."""
    model = tiny_model("llama")
    for module in (model, *model.model.layers):
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch.distributed.fsdp"})
    tritonpack.patch(nn.ModuleDict({"policy": model})).prove()
    quantized = torch.ao.quantization.quantize_dynamic(tiny_model("llama").float(), {nn.Linear}, dtype=torch.qint8)
    tritonpack.patch(quantized)
    quantized(**call_of())
    with torch.device("meta"):
        tritonpack.patch(empty := LlamaForCausalLM(config()))
        empty(torch.ones(1, 4, dtype=torch.long))
    assert not tries
    layer = quantized.model.layers[1].self_attn
    layer.forward = foreign.attends_by_itself.__get__(layer)
    tritonpack.unpatch(quantized)
    with pytest.raises(UnsupportedModelError, match=r"first in model\.layers\.1\.self_attn"):
        tritonpack.patch(quantized).prove()
    monkeypatch.setattr(forwards.transformers, "__version__", "6.1.0.dev0")  # with which no class has been tried
    tritonpack.patch(model := tiny_model("llama"))
    for _ in range(2):
        model(**call_of())
    assert len(tries) == 2


@pytest.mark.parametrize("arguments", [call_of(), {"input_ids": IDS.expand(2, -1)}], ids=["packed", "not"])
def test_the_first_call_proves_whatever_it_holds(arguments: dict[str, Tensor], tries: list[Any]) -> None:
    """So ranks prove together. A refused model is refused in every call, until the leak is gone."""
    model, wrong = Unshown(config()), Unshown(config())
    handle = tritonpack.patch(model)
    tritonpack.patch(wrong)
    own, wrong.lm_head = wrong.lm_head, Convolution(wrong.lm_head)
    for _ in range(2):
        model(**arguments)
        with pytest.raises(UnsupportedModelError, match="lm_head"):
            wrong(**arguments)
    wrong.lm_head = own
    wrong(**arguments)
    assert len(tries) == 4
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    model.model(**call_of())  # the proof of a model covers those inside
    handle.prove()
    assert len(tries) == 4
    handle.unpatch()
    with pytest.raises(ValueError, match="this patch was removed"):
        handle.prove()


def test_a_model_inside_of_a_head_with_one_result_a_row() -> None:
    """The proof of the head doesn't cover it."""
    head: Any = type("OwnForSequenceClassification", (LlamaForSequenceClassification,), {})(config(pad_token_id=0))
    head.model.forward = foreign.mixes_states.__get__(head.model)
    tritonpack.patch(head)
    head(IDS.expand(2, -1))
    with pytest.raises(UnsupportedModelError, match=r"first in the model itself \(LlamaModel\)"):
        head.model(**call_of())


@pytest.mark.fast("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_come_later(dtype: torch.dtype, tmp_path: Path) -> None:
    """A model without weights isn't proven until it has some; nor is one that is loaded by name."""
    Unshown(config()).save_pretrained(tmp_path)
    for kind in (Unshown, Mixing):
        model = kind.from_pretrained(tmp_path, attn_implementation="tritonpack", dtype=dtype)
        with refused(kind, "Mixing isn't a model that tritonpack knows"):
            model(**call_of())
        with torch.device("meta"):
            empty = kind(config())
            handle = tritonpack.patch(empty)
            empty(torch.ones(1, 4, dtype=torch.long))
        with pytest.raises(ValueError, match=r"on the meta device; load them before you call prove\(\)"):
            handle.prove()
        empty.to_empty(device="cpu").to(dtype).load_state_dict(Unshown(config()).state_dict())
        empty.model.rotary_emb = type(empty.model.rotary_emb)(config())
        with refused(kind):
            empty(**call_of())


CONTEXTS = {
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "another dtype": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16), "peft": contextlib.nullcontext,
    "fake tensors": FakeTensorMode,
}  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kind", [Unshown, Mixing])
def test_a_call_in_any_context(kind: Any, context: str) -> None:
    with CONTEXTS[context]():
        model = kind(config())
        if context == "peft":
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        tritonpack.patch(model)
        if context == "another dtype":  # than at the patch
            model.to(torch.bfloat16)
        with refused(kind) if context != "fake tensors" else contextlib.nullcontext():
            model(**call_of())


class Watched(LlamaForCausalLM):
    """A model with all that a call may change: statistics, states, draws, counts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.BatchNorm1d(VOCAB)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("statistics", torch.zeros(2))
        self.last: Any = None
        self.state: Tensor | None = None
        self.counts, self.seen = {"calls": 0}, [0.0]

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = self.norm(output.logits.flatten(0, 1)).view_as(output.logits)
        self.calls += 1
        self.statistics.data += 1  # torch counts no write
        self.counts["calls"] += 1
        self.seen.append(random.random() + np.random.rand())
        self.state, self.later, self._later, self.last = output.logits.detach()[:, -1], 1, 1, output
        return output


def trace_of(model: nn.Module) -> Any:
    modules, tensors = list(model.modules()), [*model.buffers(), *model.parameters()]
    return (
        [
            (m.training, list(m.__dict__), id(m.__dict__.get("state")), m.__dict__.get("counts", {}).copy())
            for m in modules
        ],
        [(m.seen.copy(), id(m.seen), list(m.last)) for m in modules if isinstance(m, Watched)],
        (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]),  # type: ignore[index,union-attr]
        [list(m._forward_hooks.items()) + list(m._forward_pre_hooks.items()) for m in modules],
        [(id(x), id(x.grad), x.tolist(), x.grad is None or x.grad.tolist()) for x in tensors],
        [m.config._attn_implementation for m in modules if isinstance(m, PreTrainedModel)],
        torch.get_rng_state().tolist(),
    )


@pytest.mark.parametrize("options", [{}, {"unpad": True}, {"share_prefixes": True}], ids=str)
@pytest.mark.parametrize("wrong", [False, True])
def test_a_proof_leaves_no_trace(wrong: bool, options: dict[str, bool]) -> None:
    model = Watched(config()).train()
    model.model.layers[0].eval()
    model(**call_of()).logits.sum().backward()
    if wrong:
        model.lm_head = Convolution(model.lm_head)
    model.model.register_forward_pre_hook(lambda module, args: None)
    handle = tritonpack.patch(model, **options)
    model.model.register_forward_pre_hook(lambda module, args: None)
    before = trace_of(model)
    with pytest.raises(UnsupportedModelError, match="lm_head") if wrong else contextlib.nullcontext():
        handle.prove()
    assert trace_of(model) == before
    assert handle.saved is None or handle.saved.tokens_given == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_the_first_call_trains_as_the_second(autocast: bool) -> None:
    """Weights that autocast has cast without gradients aren't used again."""
    model, gradients = Unshown(config()).train(), []
    model.model.layers[1].mlp = foreign.Scaled(model.model.layers[1].mlp)
    tritonpack.patch(model)
    for _ in range(2):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**call_of()).logits.float().square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *gradients))
    assert model.model.layers[1].mlp.calls == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", ["whole", "layers"])
def test_compiled_code_is_compiled_once(part: str) -> None:
    """A graph needs a proof before it; what a proof runs isn't compiled."""
    graphs = Graphs()
    model: Any = Unshown(config(num_hidden_layers=1))
    options: Any = {"backend": graphs, "fullgraph": True, "dynamic": True}
    handle, forward = tritonpack.patch(model), model
    if part == "whole":
        forward = torch.compile(model, **options)
        with pytest.raises(Exception, match=r"Unshown isn't proven yet.*call prove\(\) on the handle"):
            forward(**call_of("without_cache"))
        torch._dynamo.reset()
        graphs.count = 0
        handle.prove()
    else:
        model.model.layers[0].compile(**options)
    for lengths in ((7, 5), (7, 2), (7, 7, 6)):
        forward(**call_of("without_cache", documents(lengths)))
    assert graphs.count == 1


def test_threads_wait_for_one_proof(tries: list[Any]) -> None:
    model, outputs = Unshown(config()), []
    tritonpack.patch(model)
    in_threads([lambda: outputs.append(model(**call_of()))] * 4)
    assert (len(outputs), len(tries)) == (4, 1)


def test_a_suspended_patch_is_not_proven() -> None:
    model = Unshown(config())
    first, second = tritonpack.patch(model, attention="eager"), tritonpack.patch(model)
    with pytest.raises(ValueError, match="a later patch of this model"):
        first.prove()
    second.prove()
    second.unpatch()
    first.prove()


class Tuples(Unshown):
    def forward(self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        return super().forward(input_ids, attention_mask, position_ids).to_tuple()


def test_a_model_that_always_returns_a_tuple() -> None:
    model, ids, places = Tuples(config()), torch.arange(3, 11)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    want = model(ids[:, 3:])[0]
    with tritonpack.patch(model):
        for options in ({}, {"return_dict": False}):
            torch.testing.assert_close(model(ids, position_ids=places, **options)[0][:, 3:], want)


def test_copies_are_proven() -> None:
    model = tiny_model("llama")
    tritonpack.patch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        leaking = mock.patch.object(LlamaAttention, "forward", foreign.attends_by_itself)
        with leaking, pytest.raises(UnsupportedModelError, match="self_attn"):
            twin(**call_of())
        twin(**call_of())


def test_an_interrupted_proof_is_run_again(tries: list[Any]) -> None:
    model = Unshown(config()).train()
    tritonpack.patch(model)
    with mock.patch.object(LlamaAttention, "forward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        model(**call_of())
    assert model.training
    model(**call_of())
    assert len(tries) == 2


@pytest.mark.parametrize("model_type", ["llama", "mamba2"])
def test_documents_that_share_their_beginnings(
    model_type: str, monkeypatch: pytest.MonkeyPatch, tries: list[Any]
) -> None:
    """A class that isn't known for that is proven in the first such call."""
    monkeypatch.setattr(proof, "is_listed", lambda kind, in_trees=False: not in_trees)
    model = zoo.tiny_model(model_type)
    tritonpack.patch(model)
    model(**call_of())
    assert not tries
    ids, ends = torch.arange(3, 9)[None], torch.tensor([[6, 6, 4, 4, 6, 6]])
    call = {"input_ids": ids, "tree_ends": ends, "position_ids": torch.tensor([[0, 1, 2, 3, 2, 3]])}
    shared = tritonpack.patch(zoo.tiny_model(model_type), share_prefixes=True)
    if model_type == "llama":
        model(**call)
        shared.prove()
        assert len(tries) == 2
    else:
        for run in (lambda: model(**call), shared.prove):
            with pytest.raises(
                UnsupportedModelError, match=r"common beginnings: .*Leave tree_ends and share_prefixes out"
            ):
                run()


# Losses of other classes, compared with the losses of documents alone in the first call with labels


def entropy(logits: Tensor, labels: Tensor, shift: int = 1, reduction: str = "mean") -> Tensor:
    flat = logits[:, :-shift].flatten(0, 1), labels[:, shift:].flatten()
    return nn.functional.cross_entropy(*flat, reduction=reduction)


def mean_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
    return (losses.sum(1) / (labels[:, 1:] >= 0).sum(1)).mean()


# Losses that mix documents. One predicts the token after the next one, too; one hardly moves the loss of new weights.
WRONG = {
    "means": with_loss(lambda logits, labels: logits.mean(1).square().sum()),
    "second token": with_loss(lambda x, y: entropy(x, y, 1, "sum") + entropy(x, y, 2, "sum")),
    "smooth": with_loss(lambda x, y: entropy(x, y) + 0.1 * (x[:, 1:] - x[:, :-1]).square().mean()),
    "mean of rows": with_loss(mean_of_rows),
    "centred in the batch": with_loss(lambda x, y: entropy(x - x.mean((0, 1)), y)),
    "shifted twice": with_loss(lambda x, y: entropy(x[:, :-1], y[:, 1:])),  # Moshi's decoder up to transformers 5.16
}
RIGHT = {"sum": with_loss(lambda x, y: entropy(x, y, reduction="sum")), "mean": with_loss(entropy), "stock": Unshown}


class Routed(MixtralForCausalLM):
    """The loss of its routers is a mean over all tokens of a call, so documents alone have another loss."""

    def forward(self, *args: Any, labels: Any = None, **more: Any) -> Any:
        return super().forward(*args, labels=labels, output_router_logits=labels is not None, **more)


def labelled(pieces: list[Tensor]) -> dict[str, Any]:
    labels = torch.cat([piece.index_fill(1, torch.tensor([0]), -100) for piece in pieces], dim=1)
    return call_of(pieces=pieces, labels=labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_mixes_documents_is_refused(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "has_known_loss", lambda model: name == "shifted twice")  # as of transformers' classes
    model, pieces = spread_out(WRONG[name](config())).to(dtype).eval(), documents()
    with torch.no_grad():
        one = labelled(pieces[:1])
        expected = model(**one).loss
        with tritonpack.patch(model):
            assert model(**call_of()).logits.shape[:2] == (1, sum(LENGTHS))
            for _ in range(2):
                with pytest.raises(ValueError, match=r" has a loss of its own.*Leave labels out"):
                    model(**labelled(pieces))
            with tritonpack.patch(model), pytest.raises(ValueError, match="has a loss of its own"):  # a second handle
                model(**labelled(pieces))
            assert model(**one).loss.item() == pytest.approx(expected.item(), rel=0.02)


def test_a_loss_that_a_known_model_was_given_is_tried() -> None:
    model = spread_out(LlamaForCausalLM(config()))
    model.loss_function = lambda logits, labels, **_: mean_of_rows(logits, labels)
    with tritonpack.patch(model), pytest.raises(ValueError, match=r" has a loss of its own.*Leave labels out"):
        model(**labelled(documents()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_accepted_and_leaves_no_trace(name: str, context: Any) -> None:
    with torch.inference_mode(context is torch.inference_mode):
        model = spread_out(RIGHT[name](config())).double().eval()
    with torch.no_grad():
        pieces = [piece for piece in documents() if piece.numel() > 1]
        alone = torch.stack([model(**labelled([piece])).loss for piece in pieces])
    counts = torch.tensor([piece.numel() - 1 for piece in pieces])
    hooks = len(model.lm_head._forward_hooks), len(model._forward_hooks)
    with context(), tritonpack.patch(model):
        loss = model(**labelled(documents())).loss
        assert torch.is_grad_enabled() == loss.requires_grad == (context is torch.enable_grad)
    expected = alone.sum() if name == "sum" else (alone * counts).sum() / counts.sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
    assert hooks == (len(model.lm_head._forward_hooks), len(model._forward_hooks))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_router_loss_equals_that_of_a_padded_batch() -> None:
    model, rows = spread_out(Routed(zoo.tiny_config("mixtral"))).double().eval(), call_of("padded_right")
    labels = torch.where(rows["attention_mask"] > 0, rows["input_ids"], -100)
    labels[:, 0] = -100
    with torch.no_grad():
        expected = model(rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss
        with tritonpack.patch(model):
            torch.testing.assert_close(model(**labelled(documents())).loss, expected, rtol=1e-6, atol=0)
