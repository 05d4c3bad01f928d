"""Layers beside attention: recurrences and convolutions, routers, states of one token."""

import functools
import importlib
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.calls import EXACT, FORMS, LENGTHS, alone, call_of, documents, packed, require_exact
from tests.patches.comparison import apart
from tests.patches.models import NAMES_OF_CACHE
from tritonpack.patches.layers.mixers import DocumentByDocument


def build(name: str, **more: Any) -> PreTrainedModel:
    return zoo.tiny_model(name, dtype=torch.float64, **more)


# Layers that mix along the row run on each document by itself, or once if their kernels take boundaries


def modeling(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def by_offsets(offsets: Tensor, dim: int, run: Callable[[Callable[[Any], Any]], Any]) -> Tensor:
    """Run a kernel on each document, as kernels do that take boundaries, and lay the outputs end to end."""
    bounds = itertools.pairwise(offsets.tolist())
    pieces = [run(lambda x, a=a, b=b: x.narrow(dim if x.ndim > 2 else 1, a, b - a)) for a, b in bounds]
    return torch.cat(pieces, dim=dim)


def fake_convolution(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function such as causal-conv1d's, which keeps the documents of `seq_idx` apart; (B, channels, T)."""

    def causal_conv1d_fn(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            kwargs.pop(name, None)
        if seq_idx is None:
            return own(x, *args, **kwargs)
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), seq_idx[0].bincount().cumsum(0)])
        return by_offsets(offsets, 2, lambda cut: own(cut(x), *args, **kwargs))

    return causal_conv1d_fn


def fake_delta_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function such as flash-linear-attention's, which keeps documents of `cu_seqlens` apart; (B, T, heads, n)."""

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any) -> Any:
        offsets = kwargs.pop("cu_seqlens", None)
        for name in ("seq_idx", "cu_seq_lens_k"):
            kwargs.pop(name, None)
        if offsets is None:
            return own(q, k, v, g=g, beta=beta, **kwargs)
        run = lambda cut: own(cut(q), cut(k), cut(v), g=cut(g), beta=cut(beta), **kwargs)[0]  # noqa: E731
        return by_offsets(offsets, 1, run), None

    return chunk_gated_delta_rule


def lengths_of_runs(model: Any) -> set[int]:
    """The lengths on which the model's mixing layers run in a packed call."""
    found: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        for layer in mixing_layers(model):

            def recorded(*args: Any, layer: Any = layer, **kwargs: Any) -> Any:
                found.add(kwargs["hidden_states"].shape[1])
                return type(layer.module).forward(layer.module, *args, **kwargs)

            patch.setattr(layer, "own", recorded)
        packed(model, gradients=False)
    return found


def mixing_layers(model: Any) -> list[Any]:
    return [m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), DocumentByDocument)]


# Which of the packages' functions have a stand-in, and whether a row then runs once. Zamba's convolution takes
# boundaries, but its scan ignores them.
KERNELS = {
    "lfm2": ((), False), "zamba": (("causal_conv1d_fn",), False),
    "lfm2 with kernels": (("causal_conv1d_fn",), True),
    "qwen3_next with kernels": (("causal_conv1d_fn", "torch_chunk_gated_delta_rule"), True),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_take_boundaries_get_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, (functions, once) = name.split()[0], KERNELS[name]
    home = modeling(model_type)
    for function in functions:
        fake = fake_convolution if "conv" in function else fake_delta_rule
        monkeypatch.setattr(home, function, fake(getattr(home, function)))
    model = build(model_type)
    expected = alone(model)
    with tritonpack.patch(model) as handle:
        handle.prove()
        assert lengths_of_runs(model) == ({sum(LENGTHS)} if once else {*LENGTHS})
        assert bool(handle.report.by_document) != once
        require_exact(model, expected, "position_ids", "collator", "offsets_alone", "segments_padded", "two_rows")


def test_boundaries_are_tried_on_the_device_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be patched on one device and moved to another that has kernels; a dtype stands for a device here."""
    model = build("lfm2")
    with tritonpack.patch(model) as handle:
        assert handle.report.by_document
        assert lengths_of_runs(model) == {*LENGTHS}
        home = modeling("lfm2")
        monkeypatch.setattr(home, "causal_conv1d_fn", fake_convolution(home.causal_conv1d_fn))
        expected = alone(zoo.tiny_model("lfm2"), gradients=False)
        require_exact(model.float(), expected)
        assert sum(LENGTHS) in lengths_of_runs(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["zamba", "lfm2", "mamba2", "qwen3_next"])
def test_a_layer_that_ignores_boundaries_runs_on_each_document(model_type: str, dtype: torch.dtype) -> None:
    """Rounding is large in bfloat16, so a change of another document must not move a document at all."""
    model = zoo.tiny_model(model_type, dtype=dtype)
    with tritonpack.patch(model):
        layers = mixing_layers(model)
        assert layers
        for layer in layers:

            def deaf(*args: Any, layer: Any = layer, **kwargs: Any) -> Any:
                for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
                    kwargs.pop(name, None)
                return type(layer.module).forward(layer.module, *args, **kwargs)

            layer.own = deaf
            assert not layer._keeps_documents_apart(model.config.hidden_size, next(layer.module.parameters()))


@pytest.mark.parametrize("model_type", ["rwkv", "recurrent_gemma", "lfm2", "mamba"])
def test_a_cache_after_padding_on_the_left(model_type: str) -> None:
    """`generate` pads prompts of several lengths: the state is the same as without padding, or the call is refused."""
    model, (document,) = zoo.tiny_model(model_type), documents((8,))
    call = {"input_ids": torch.cat([torch.full((1, 3), 5), document], 1), "attention_mask": torch.ones(1, 11).long()}
    call["attention_mask"][0, :3] = 0
    with torch.no_grad():
        expected = model(document).logits
        tritonpack.patch(model)
        if model_type in ("rwkv", "recurrent_gemma"):
            for run in (lambda: model(**call, use_cache=True), lambda: model.generate(**call, max_new_tokens=2)):
                with pytest.raises(ValueError, match=r"would read the padding on the left.*use_cache=False"):
                    run()
        else:
            torch.testing.assert_close(model(**call, use_cache=True).logits[:, 3:], expected)
        torch.testing.assert_close(model(**call, use_cache=False).logits[:, 3:], expected)


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_a_packed_batch_leaves_no_cache(name: str) -> None:
    model = zoo.tiny_model("bamba")
    with tritonpack.patch(model):
        assert model(**call_of(use_cache=True)).get(name) is None
        assert model(documents()[0], use_cache=True)[name] is not None
        with pytest.raises(ValueError, match=r"can't use a cache\. Leave the cache out"):
            model(**call_of(), **{name: DynamicCache(config=model.config)})


# Losses of routers get a mask of 0 and 1, in whatever way the call tells documents apart, and leave out padding ----


def routed(family: str) -> PreTrainedModel:
    model = build(family, pad_token_id=0)
    for name in ("router_aux_loss_coef", "router_aux_coef", "aux_loss_coef"):
        for holder in (model.config, model.config.get_text_config(), model):
            if hasattr(holder, name):
                setattr(holder, name, 1.0)  # large enough to show in the gradient
    return model


def router_losses(model: nn.Module, call: dict[str, Any]) -> list[Any]:
    batch = FORMS["padded_right"](documents()) if "form" not in call else FORMS[call.pop("form")](documents())
    labels = torch.full_like(batch.ids, -100)
    for row, span in batch.spans:
        labels[row, span] = batch.ids[row, span]
        labels[row, span.start] = -100
    call = {"input_ids": batch.ids, **batch.arguments, "labels": labels, **call, "use_cache": False}
    output = model(**call, output_router_logits=True)
    gradients = torch.autograd.grad(output.loss, [*model.parameters()], allow_unused=True)
    return [torch.stack([output.loss, output.aux_loss]).detach().double(), *gradients]


AS_DOCUMENT = torch.cat([*(torch.arange(n) for n in LENGTHS), torch.arange(3)])[None]  # padding is a document
OFFSETS = torch.tensor([0, 7, 8, 11, 22, 25])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "jamba", "dbrx", "olmoe", "phimoe"])
@pytest.mark.fast("gpt_oss", "phimoe")
def test_router_loss_equals_padded_training(family: str) -> None:
    model = routed(family)
    expected = router_losses(model, {})
    with tritonpack.patch(model):
        for form in FORMS:
            if form != "with_cache":
                assert apart(expected, router_losses(model, {"form": form})) < EXACT, form
        for told in ({"position_ids": AS_DOCUMENT}, {"cu_seq_lens_q": OFFSETS, "position_ids": AS_DOCUMENT}):
            assert apart(expected, router_losses(model, {"form": "padded_end", **told})) < EXACT, list(told)


def test_documents_of_padding_tokens_inside_a_row_count() -> None:
    """Only tokens that fill a row up are padding, and a row is never all padding."""
    model, pieces = routed("mixtral"), documents((7, 4))
    middle = torch.cat([pieces[0], torch.zeros(1, 3, dtype=torch.long), pieces[1]], dim=1)
    told = {"position_ids": torch.cat([torch.arange(n) for n in (7, 3, 4)])[None], "output_router_logits": True}
    with tritonpack.patch(model), torch.no_grad():
        expected = model(middle, **told, attention_mask=torch.ones_like(middle)).aux_loss
        assert float((model(middle, **told).aux_loss - expected).abs()) < EXACT
        assert model(middle * 0, **told).aux_loss.isfinite()


def test_forward_replaced_after_patching_is_refused() -> None:
    """Liger-Kernel replaces forwards. A wrapper that calls ours, such as accelerate's, replaces nothing."""
    model, call = routed("mixtral"), call_of("segments_alone", output_router_logits=True)
    with tritonpack.patch(model):
        expected, own = model(**call).aux_loss, model.forward
        model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
        assert torch.equal(model(**call).aux_loss, expected)
        model.forward = types.MethodType(type(model).forward, model)
        assert model(**call | {"output_router_logits": False}).logits.isfinite().all()
        with pytest.raises(ValueError, match=r"the forward of MixtralForCausalLM was replaced since .* was patched"):
            model(**call)
        model.forward = own


@pytest.mark.fast("inkling2_text-eager")
@pytest.mark.parametrize("attention", ["tritonpack", "eager"])
@pytest.mark.parametrize("name", ["inkling2_text", "inkling2_loop_text"])
def test_attention_among_the_states_of_one_token(name: str, attention: Any) -> None:
    """It gets no mask, from the same function that layers call with one. Packed documents stay in one row."""
    model = zoo.tiny_model(name)
    expected = alone(model, gradients=False)
    with tritonpack.patch(model, attention=attention) as handle:
        assert handle.report.attention == attention
        require_exact(model, expected)
