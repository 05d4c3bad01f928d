"""Layers that mix along the row run on each document by itself, or once if their kernels take boundaries."""

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.models import NAMES_OF_CACHE
from tritonpack.patches.layers.mixers import DocumentByDocument
from tritonpack.patches.packed_batch import PackedBatch, Serving
from tritonpack.patches.placement import batches_of, lay_back


def modeling(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def by_offsets(offsets: Tensor, dim: int, run: Callable[[Callable[[Any], Any]], Any]) -> Tensor:
    """Run a kernel on each document, as kernels do that take boundaries, and lay the outputs end to end."""
    bounds = offsets.tolist()
    pieces = [
        run(lambda x, a=a, b=b: x.narrow(dim if x.ndim > 2 else 1, a, b - a)) for a, b in itertools.pairwise(bounds)
    ]
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


def count_calls(model: Any) -> list[tuple[int, ...]]:
    """Record the shapes of inputs of the model's mixing layers from now on."""
    shapes: list[tuple[int, ...]] = []
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), DocumentByDocument):
            stand_in = module.forward
            own = type(module).forward

            def recorded(*args: Any, own: Any = own, module: Any = module, **kwargs: Any) -> Any:
                shapes.append(tuple(kwargs["hidden_states"].shape[:2]))
                return own(module, *args, **kwargs)

            stand_in.own = recorded
    return shapes


@pytest.mark.fast("lfm2")
@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next"])
def test_kernels_that_take_boundaries_get_them(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other functions stand in for those of the packages; the row runs once and is exact."""
    home = modeling(model_type)
    monkeypatch.setattr(home, "causal_conv1d_fn", fake_convolution(home.causal_conv1d_fn))
    if hasattr(home, "torch_chunk_gated_delta_rule"):
        name = "torch_chunk_gated_delta_rule"
        monkeypatch.setattr(home, name, fake_delta_rule(getattr(home, name)))
    assert sweep.run(model_type).verdict == "exact"
    model, documents = zoo.tiny_model(model_type, dtype=torch.float64), zoo.documents(sweep.LENGTHS)
    with tritonpack.patch(model) as handle:
        handle.prove()
        shapes = count_calls(model)
        sweep.logits(model, sweep.FORMS["position_ids"](documents))
        assert set(shapes) == {(1, sum(sweep.LENGTHS))}
        assert handle.report.by_document == ()


@pytest.mark.fast("lfm2")
@pytest.mark.parametrize("model_type", ["zamba", "lfm2"])
def test_layers_that_would_leak_run_on_each_document(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zamba's convolution takes boundaries, but its scan ignores them; LFM2's kernel isn't installed."""
    home = modeling(model_type)
    if model_type == "zamba":
        monkeypatch.setattr(home, "causal_conv1d_fn", fake_convolution(home.causal_conv1d_fn))
    assert sweep.run(model_type, forms=["position_ids", "collator"]).verdict == "exact"
    model, documents = zoo.tiny_model(model_type, dtype=torch.float64), zoo.documents(sweep.LENGTHS)
    with tritonpack.patch(model) as handle:
        handle.prove()
        shapes = count_calls(model)
        sweep.logits(model, sweep.FORMS["position_ids"](documents))
        assert set(shapes) == {(1, 1), (1, 3), (1, 7), (1, 11)}
        assert handle.report.by_document


def test_boundaries_are_tried_on_the_device_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may be patched on one device and moved to another that has kernels; a dtype stands for a device here."""
    model, documents = zoo.tiny_model("lfm2", dtype=torch.float64), zoo.documents(sweep.LENGTHS)
    with tritonpack.patch(model) as handle:
        assert handle.report.by_document
        shapes = count_calls(model)
        sweep.logits(model, sweep.FORMS["position_ids"](documents))
        assert (1, sum(sweep.LENGTHS)) not in shapes
        home = modeling("lfm2")
        monkeypatch.setattr(home, "causal_conv1d_fn", fake_convolution(home.causal_conv1d_fn))
        model.float()
        expected = sweep.alone(zoo.tiny_model("lfm2"), documents, gradients=False).values
        shapes.clear()
        got = sweep.logits(model, sweep.FORMS["position_ids"](documents)).detach()
        assert float((got - expected).abs().max() / expected.abs().max()) < sweep.tolerance(model)
        assert set(shapes[-1:]) == {(1, sum(sweep.LENGTHS))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["zamba", "lfm2", "mamba2", "qwen3_next"])
def test_a_layer_that_ignores_boundaries_runs_on_each_document(model_type: str, dtype: torch.dtype) -> None:
    """Rounding is large in bfloat16, so a change of another document must not move a document at all."""
    model = zoo.tiny_model(model_type, dtype=dtype)
    with tritonpack.patch(model):
        layers = [m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), DocumentByDocument)]
        assert layers
        for layer in layers:
            own = type(layer.module).forward

            def deaf(*args: Any, own: Any = own, module: Any = layer.module, **kwargs: Any) -> Any:
                for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"):
                    kwargs.pop(name, None)
                return own(module, *args, **kwargs)

            layer.own = deaf
            weight = next(layer.module.parameters())
            assert not layer._keeps_documents_apart(model.config.hidden_size, weight)
            layer.own = None


def test_documents_of_similar_lengths_share_a_batch() -> None:
    lengths = (5, 1, 7, 6, 12, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed_batch = PackedBatch(
        None, positions, None, torch.Size((1, 32)), torch.device("cpu"), Serving("tritonpack", "auto"), True
    )
    batches = batches_of(packed_batch)
    assert [tuple(batch.places.shape) for batch in batches] == [(2, 1), (3, 7), (1, 12)]
    tokens = torch.arange(1, 33)[None]
    assert torch.equal(lay_back(batches, [batch.cut(tokens) for batch in batches]), tokens)
    assert sum(batch.places.numel() for batch in batches) < 2 * 32


@pytest.mark.parametrize("model_type", ["rwkv", "recurrent_gemma", "lfm2", "mamba"])
def test_a_cache_after_padding_on_the_left(model_type: str) -> None:
    """`generate` pads prompts of several lengths: the state is the same as without padding, or the call is refused."""
    model = zoo.tiny_model(model_type)
    document = zoo.documents((8,))[0]
    ids = torch.cat([torch.full((1, 3), 5), document], 1)
    mask = torch.tensor([[0] * 3 + [1] * 8])
    with torch.no_grad():
        expected = model(document).logits
        tritonpack.patch(model)
        if model_type in ("rwkv", "recurrent_gemma"):
            with pytest.raises(ValueError, match=r"would read the padding on the left.*use_cache=False"):
                model(ids, attention_mask=mask, use_cache=True)
            with pytest.raises(ValueError, match="would read the padding on the left"):
                model.generate(ids, attention_mask=mask, max_new_tokens=2)
        else:
            torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=True).logits[:, 3:], expected)
        torch.testing.assert_close(model(ids, attention_mask=mask, use_cache=False).logits[:, 3:], expected)


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_a_packed_batch_leaves_no_cache(name: str) -> None:
    model, documents = zoo.tiny_model("bamba"), zoo.documents(sweep.LENGTHS)
    ids, told = torch.cat(documents, 1), sweep.FORMS["position_ids"](documents).arguments
    with tritonpack.patch(model):
        assert model(ids, use_cache=True, **told).get(name) is None
        assert model(documents[0], use_cache=True)[name] is not None
        cache = DynamicCache(config=model.config)
        with pytest.raises(ValueError, match=r"can't use a cache\. Leave the cache out"):
            model(ids, **{name: cache}, **told)


def test_a_layer_called_outside_of_its_model_is_refused() -> None:
    model = zoo.tiny_model("lfm2")
    layer = next(m for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")
    with tritonpack.patch(model), pytest.raises(ValueError, match="Lfm2ShortConv was called outside"):
        layer(torch.zeros(1, 3, 32))
    assert layer(torch.zeros(1, 3, 32)).shape == (1, 3, 32)


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["jamba", "nemotron_h", "qwen3_next"])
@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_one_more_token_without_a_mask(name: str, model_type: str, attention: Any) -> None:
    """The first layer has no keys, but transformers takes the length of the cache from it."""
    model, ids = zoo.tiny_model(model_type, dtype=torch.float64), zoo.documents((9,))[0]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -2:]
        with tritonpack.patch(model, attention=attention):
            cache = model(ids[:, :7], use_cache=True)[name]
            got = [model(ids[:, i : i + 1], **{name: cache}, use_cache=True).logits for i in (7, 8)]
    assert float((torch.cat(got, 1) - expected).abs().max() / expected.abs().max()) < sweep.tolerance(model)
