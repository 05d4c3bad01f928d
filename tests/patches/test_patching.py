"""Patched models: exact in every form of packing, and identical to the originals after unpatching."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification, LlamaModel, MambaConfig

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.models import COMMON, FAMILIES, NAMES_OF_CACHE, VOCAB, generate, tiny_model

LENGTHS = (7, 1, 3, 11)
# Relative, in float64; a leak is 1e-2 or more. transformers computes norms and rotary angles in float32 all the same,
# so the last bit of a float64 may decide a rounding.
EXACT = 8 * torch.finfo(torch.float32).eps

every_family = pytest.mark.parametrize("family", FAMILIES)


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, n), generator=generator) for n in lengths]


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


def segments() -> Tensor:
    return torch.cat([torch.full((1, n), i + 1) for i, n in enumerate(LENGTHS)], dim=1)


def collator_kwargs() -> dict[str, Any]:
    longest = max(LENGTHS)
    return {
        "cu_seq_lens_q": offsets(),
        "cu_seq_lens_k": offsets(),
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": segments().int() - 1,
    }


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "position_ids": lambda: {"position_ids": positions()},
    "without_cache": lambda: {"position_ids": positions(), "use_cache": False},
    "all_ones_mask": lambda: {"position_ids": positions(), "attention_mask": torch.ones_like(positions())},
    "bool_mask": lambda: {"position_ids": positions(), "attention_mask": torch.ones_like(positions()).bool()},
    "collator": lambda: {"position_ids": positions(), **collator_kwargs()},
    "seq_idx": lambda: {"position_ids": positions(), "seq_idx": segments().int()},
    "segment_mask": lambda: {"position_ids": positions(), "attention_mask": segments()},
}


def logits_and_gradients(
    model: nn.Module, calls: list[dict[str, Any]], pick: Callable[[list[Tensor]], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Logits of all documents in a row, and the gradients of a loss that depends on all of them."""
    logits = pick([model(**call).logits for call in calls])
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return logits.detach(), list(torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True))


def alone(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    return logits_and_gradients(model, [{"input_ids": d} for d in documents()], lambda out: torch.cat(out, dim=1))


def difference(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> float:
    """Relative to the largest value of each kind: gradients of key biases are mathematically zero."""
    largest = max(float(g.abs().max()) for g in a[1] if g is not None)
    pairs = [(x, y) for x, y in zip(a[1], b[1], strict=True) if x is not None or y is not None]
    gradients = max(float((x - y).abs().max()) for x, y in pairs) / largest
    return max(float((a[0] - b[0]).abs().max() / a[0].abs().max()), gradients)


@every_family
def test_packed_equals_alone(family: str) -> None:
    model = tiny_model(family)
    expected = alone(model)
    ids = torch.cat(documents(), dim=1)
    with tritonpack.patch(model):
        for form, arguments in FORMS.items():
            got = logits_and_gradients(model, [{"input_ids": ids, **arguments()}], lambda out: out[0])
            assert difference(expected, got) < EXACT, form


@every_family
def test_stock_leaks_in_the_same_test(family: str) -> None:
    """Shows that the tests above can fail."""
    model = tiny_model(family)
    expected = alone(model)
    call = {"input_ids": torch.cat(documents(), dim=1), **FORMS["all_ones_mask"]()}
    assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) > 1e-3


@pytest.mark.fast("-left-gemma", "-right-mistral", "positions-left-olmo2", "positions-right-gpt_neox")
@every_family
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("with_positions", [False, True], ids=["", "positions"])
def test_padded_batch(family: str, side: str, with_positions: bool) -> None:
    model = tiny_model(family)
    expected = alone(model)
    width = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.long), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    spans = [slice(width - n, width) if side == "left" else slice(0, n) for n in LENGTHS]
    for row, (span, d) in enumerate(zip(spans, documents(), strict=True)):
        ids[row, span], mask[row, span] = d[0], 1
    call = {"input_ids": ids, "attention_mask": mask}
    if with_positions:
        call["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)

    def pick(out: list[Tensor]) -> Tensor:
        return torch.cat([out[0][row, span] for row, span in enumerate(spans)])[None]

    with tritonpack.patch(model):
        assert difference(expected, logits_and_gradients(model, [call], pick)) < EXACT


@every_family
def test_several_packed_rows(family: str) -> None:
    """Two rows, the second padded on the right. Position ids tell documents apart, the mask tells padding."""
    model = tiny_model(family)
    expected = alone(model)
    d = documents()
    ids, place, mask = (torch.zeros(2, 14, dtype=torch.long) for _ in range(3))
    ids[0, :11], place[0, :11], mask[0, :11] = torch.cat(d[:3], 1)[0], positions(LENGTHS[:3])[0], 1
    ids[1, :11], place[1, :11], mask[1, :11] = d[3][0], torch.arange(11), 1
    call = {"input_ids": ids, "position_ids": place, "attention_mask": mask}
    with tritonpack.patch(model):
        got = logits_and_gradients(model, [call], lambda out: torch.cat([out[0][0, :11], out[0][1, :11]])[None])
    assert difference(expected, got) < EXACT


@pytest.mark.fast("False-llama", "True-gpt_neox", "True-mistral", "True-phi3", "True-starcoder2")
@every_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    model = tiny_model(family)
    expected = alone(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with tritonpack.patch(model):
        logits = model(input_ids=torch.cat(documents(), 1), position_ids=positions(), use_cache=False).logits
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
        (logits * weights).sum().backward()
    got = (logits.detach(), [p.grad for p in model.parameters() if p.requires_grad])
    assert difference(expected, got) < EXACT


@pytest.mark.fast("-dynamic-llama", "left-padded-static-mistral")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])  # without windows, with windows, with both
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 4], ids=["", "left-padded"])
def test_generate(family: str, cache: str, padding: int) -> None:
    model, ids = tiny_model(family), torch.cat([documents((9,))[0], documents((1, 9))[1]])
    expected, want = generate(model, ids, cache=cache, padding=padding)
    with tritonpack.patch(model):
        got, have = generate(model, ids, cache=cache, padding=padding)
    assert torch.equal(expected, got)
    assert float((want - have).abs().max() / want.abs().max()) < EXACT


@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_continuing_from_the_cache_of_a_packed_row(name: str) -> None:
    """The last document of a packed row continues; its positions separate it from those before."""
    model = tiny_model("mistral")
    more = documents((5,))[0]
    expected = model(torch.cat([documents()[-1], more], 1)).logits[:, -5:]
    with tritonpack.patch(model):
        cache = model(torch.cat(documents(), 1), position_ids=positions(), use_cache=True)[name]
        got = model(more, position_ids=torch.arange(LENGTHS[-1], LENGTHS[-1] + 5)[None], **{name: cache}).logits
    assert float((expected - got).abs().max() / expected.abs().max()) < EXACT


@pytest.mark.parametrize("family", ["bloom", "falcon-alibi", "mpt"])
@pytest.mark.parametrize("name", NAMES_OF_CACHE)
def test_continuing_without_the_mask_that_makes_alibi(name: str, family: str) -> None:
    """The biases of all keys are made from a mask, which must cover the cache, too."""
    model, ids = zoo.tiny_model(family, dtype=torch.float64), zoo.documents((9,))[0]
    expected = model(ids).logits[:, -2:]
    with tritonpack.patch(model):
        cache = model(ids[:, :7], use_cache=True)[name]
        got = model(ids[:, 7:], **{name: cache}).logits
    assert float((expected - got).abs().max() / expected.abs().max()) < sweep.tolerance(model)


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_inner_model(kind: Any) -> None:
    """It may be called with packed rows, also in a classifier, which refuses them."""
    torch.manual_seed(0)
    model, ids = kind(LlamaConfig(**COMMON, num_labels=3)).double().eval(), torch.cat(documents(), 1)
    inner = model.base_model
    expected = torch.cat([inner(d)[0] for d in documents()], 1)
    with tritonpack.patch(model):
        assert float((inner(ids, position_ids=positions())[0] - expected).abs().max()) < EXACT


def test_arguments_by_position() -> None:
    model = tiny_model("llama")
    ids = torch.cat(documents(), 1)
    with tritonpack.patch(model):
        by_name = model.model(input_ids=ids, position_ids=positions())[0]
        assert torch.equal(model.model(ids, None, positions())[0], by_name)


@pytest.mark.parametrize("name", ["llama", "bloom", "gptj", "mamba", "xlnet"])
@pytest.mark.parametrize("form", ["position_ids", "offsets_alone"])
def test_forward_called_without_hooks(name: str, form: str) -> None:
    """PEFT calls models so. Some heads pass on only some of their arguments."""
    model, pieces = zoo.tiny_model(name, dtype=torch.float64), zoo.documents(LENGTHS)
    expected = torch.cat([model(d).logits for d in pieces], dim=1)
    columns = list(inspect.signature(model.forward).parameters)
    with tritonpack.patch(model):
        assert list(inspect.signature(model.forward).parameters) == columns  # trainers choose columns by them
        batch = sweep.FORMS[form](pieces)
        got = model.forward(batch.ids, **batch.arguments).logits
    assert float((got - expected).abs().max() / expected.abs().max()) < sweep.tolerance(model)


@pytest.mark.parametrize("name", ["codegen", "gptj"])
def test_dense_masks_are_for_attention_outside_of_the_interface(name: str) -> None:
    """Since transformers 5.24 these types use the interface, so no layer takes a dense mask."""
    model = zoo.tiny_model(name, dtype=torch.float64)
    asks = any("ALL_ATTENTION_FUNCTIONS" in type(m).forward.__code__.co_names for m in model.modules())
    with tritonpack.patch(model) as handle:
        assert handle.report.attention == ("tritonpack" if asks else "dense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    expected = torch.cat([model(d).logits for d in documents()], 1)
    with tritonpack.patch(model):
        got = model(torch.cat(documents(), 1), position_ids=positions()).logits
    assert got.dtype == dtype
    assert float((expected - got).abs().max() / expected.abs().max()) < 8 * torch.finfo(dtype).eps


@every_family
@pytest.mark.parametrize("use_cache", [False, True])
def test_mixed_precision_training(family: str, use_cache: bool) -> None:
    """Under autocast some families pass float32 queries and bfloat16 values to attention. torch's attention casts them,
    and so does ours."""
    model = tiny_model(family, dtype=torch.float32).train()
    ids = torch.cat(documents(), 1)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=use_cache).loss
        loss.backward()
        return loss, model.get_input_embeddings().weight.grad

    expected, expected_gradient = loss_and_gradient()
    with tritonpack.patch(model):
        got, gradient = loss_and_gradient()
    assert torch.allclose(got, expected, rtol=1e-3)
    assert (gradient - expected_gradient).norm() < 0.05 * expected_gradient.norm()


def state(model: nn.Module) -> dict[str, Any]:
    """All objects that a patch may change, by identity."""
    hooks = {
        name: (dict(m._forward_pre_hooks), dict(m._forward_pre_hooks_with_kwargs)) for name, m in model.named_modules()
    }
    forwards = {name: inspect.unwrap(m.forward) for name, m in model.named_modules()}
    return {
        "hooks": hooks,
        "forwards": forwards,
        "guards": [name for name, m in model.named_modules() if "_replicate_for_data_parallel" in m.__dict__],
        "config": copy.copy(model.config.__dict__),
        "config_is": id(model.config),
    }


@every_family
def test_unpatching_restores_the_model(family: str) -> None:
    model = tiny_model(family)
    before, ids = state(model), torch.cat(documents(), 1)
    expected = model(ids).logits
    handle = tritonpack.patch(model)
    assert state(model)["config"] != before["config"]
    handle.unpatch()
    handle.unpatch()  # a second call does nothing
    assert state(model) == before
    assert torch.equal(model(ids).logits, expected)


def test_unpatching_after_an_exception_inside_a_forward() -> None:
    model = tiny_model("llama")
    before = state(model)
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("inside")))
    with pytest.raises(RuntimeError, match="inside"), tritonpack.patch(model):
        model(torch.cat(documents(), 1), position_ids=positions())
    broken.remove()
    assert state(model) == before
    with tritonpack.patch(model):  # the next patch has no state of the failed forward
        assert torch.isfinite(model(torch.cat(documents(), 1), position_ids=positions()).logits).all()


def test_unpatching_an_unpatched_model_is_refused() -> None:
    with pytest.raises(ValueError, match="isn't patched"):
        tritonpack.unpatch(tiny_model("llama"))


def test_a_copy_of_a_patched_model_is_patched_by_itself() -> None:
    model = tiny_model("llama")
    ids = torch.cat(documents(), 1)
    tritonpack.patch(model)
    twin = copy.deepcopy(model)
    tritonpack.unpatch(model)
    expected = torch.cat([model(d).logits for d in documents()], 1)
    assert float((twin(ids, position_ids=positions()).logits - expected).abs().max()) < EXACT
    tritonpack.unpatch(twin)
    assert state(twin)["config"]["_attn_implementation_internal"] == "sdpa"


def test_a_saved_model_has_no_trace_of_the_patch(tmp_path: Any) -> None:
    model = tiny_model("llama")
    with tritonpack.patch(model):
        model.save_pretrained(tmp_path)
    assert "tritonpack" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation != "tritonpack"


def test_models_that_share_a_config() -> None:
    """A model that is not patched gets no packing, so it is refused. The name stays until both are unpatched."""
    config = LlamaConfig(**COMMON)
    first, second = LlamaModel(config).double().eval(), LlamaModel(config).double().eval()
    second.config = first.config
    before, ids = config._attn_implementation, torch.cat(documents(), 1)
    expected = torch.cat([second(d)[0] for d in documents()], 1)
    one = tritonpack.patch(first)
    with pytest.raises(ValueError, match="its model isn't patched"):
        second(ids, position_ids=positions())
    two = tritonpack.patch(second)
    one.unpatch()
    assert float((second(ids, position_ids=positions())[0] - expected).abs().max()) < EXACT
    two.unpatch()
    assert first.config._attn_implementation == before


def test_an_implementation_set_after_patching_is_refused() -> None:
    model = tiny_model("llama")
    with tritonpack.patch(model) as handle:
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="'eager' since this model was patched"):
            model(torch.cat(documents(), 1), position_ids=positions())
        handle.unpatch()
        assert model.config._attn_implementation == "sdpa"


def test_report() -> None:
    handle = tritonpack.patch(tiny_model("qwen2"), backend="reference")
    report = handle.report
    assert (report.model_type, report.layers, report.windows) == ("qwen2", 2, (None, 4))
    assert str(report) == "qwen2: 2 layers, 1 with a sliding window of [4]; backend reference, in place of sdpa"


def test_what_cannot_be_packed_is_refused_with_the_reason() -> None:
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"'prophetnet'.* masks and position buckets of its own"):
        tritonpack.patch(zoo.tiny_model("prophetnet"))
    with pytest.raises(tritonpack.UnsupportedModelError, match="expected a transformers model; got Linear"):
        tritonpack.patch(nn.Linear(2, 2))
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"'gemma2'.* doesn't support sdpa"):
        tritonpack.patch(zoo.tiny_model("gemma2"), attention="sdpa")


def test_attention_in_blocks_of_the_row_is_refused() -> None:
    """BigBird switches to full attention for short rows, but only after the first short row."""
    sparse = {"is_decoder": False, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    model = zoo.tiny_model("big_bird", **sparse)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"set_attention_type\('original_full'\)"):
        tritonpack.patch(model)
    model.base_model.set_attention_type("original_full")
    tritonpack.patch(model)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "hole in the mask": ({"attention_mask": torch.tensor([[1] * 5 + [0] + [1] * 16])}, "padding inside a document"),
    "mask of another length": ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "attention_mask has shape"),
    "mask of fractions": ({"attention_mask": torch.full((1, 22), 0.5)}, "must hold whole numbers"),
    "mask of addends": ({"attention_mask": torch.full((1, 22), -torch.inf)}, "must hold whole numbers"),
    "mask of negative numbers": (
        {"attention_mask": torch.tensor([[1] * 20 + [-1] * 2])},
        r"must hold whole numbers, 0 for padding and 1, or the number of the document, for tokens; got -1\.",
    ),
    "mask of one dimension": (
        {"attention_mask": torch.ones(22, dtype=torch.long)},
        r"attention_mask must be a two-dimensional tensor.*; got \(22,\) int64 on cpu",
    ),
    "mask of three dimensions": (
        {"attention_mask": torch.ones(1, 22, 22, dtype=torch.long)},
        r"attention_mask has shape \(1, 22, 22\); a patched model makes masks of pairs of tokens itself",
    ),
    "mask of four dimensions": (
        {"attention_mask": torch.ones(1, 1, 22, 22, dtype=torch.bool)},
        "isn't block-diagonal and causal",
    ),
    "offsets too short": ({"cu_seq_lens_q": torch.tensor([0, 5, 20])}, "end with the number of tokens, 22"),
    "offsets that decrease": ({"cu_seq_lens_q": torch.tensor([0, 9, 5, 22])}, "never decrease"),
    "offsets that differ": (
        {"cu_seq_lens_q": torch.tensor([0, 22]), "cu_seq_lens_k": torch.tensor([0, 2, 22])},
        "differ",
    ),
    "offsets against positions": (
        {"position_ids": positions(), "cu_seq_lens_q": torch.tensor([0, 9, 22])},
        r"cu_seq_lens_q and position_ids contradict each other \(row 0, token 7: \[4, 5, 6, 0, 0, 1, 2\] around it.*"
        r"by cu_seq_lens_q documents begin at 0, 9, by position_ids at 0, 7, 8, 11",
    ),
    "numbers against positions": (
        {"position_ids": torch.arange(22)[None], "seq_idx": segments()},
        r"seq_idx and position_ids contradict.*by seq_idx documents begin at 0, 7, 8, 11, by position_ids at 0\.",
    ),
    "segments against positions": (
        {"position_ids": torch.arange(22)[None], "attention_mask": segments()},
        r"attention_mask and position_ids contradict.*by attention_mask documents begin at 0, 7, 8, 11, by",
    ),
    "zeros over packed documents": (
        {"position_ids": positions(), "attention_mask": torch.tensor([[1] * 13 + [0] * 2 + [1] * 7])},
        r"padding inside a document \(row 0, token 15: \[1, 0, 0, 1, 1, 1, 1\] around it",
    ),
    "numbers of another length": ({"seq_idx": torch.zeros(1, 9, dtype=torch.int32)}, "seq_idx has shape"),
    "attentions asked for": ({"output_attentions": True}, "output_attentions"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_are_refused(name: str) -> None:
    arguments, message = BAD_CALLS[name]
    with tritonpack.patch(tiny_model("llama")) as handle, pytest.raises(ValueError, match=message):
        handle.model(torch.cat(documents(), 1), **arguments)


def test_dropout_in_training() -> None:
    """The same random state drops the same pairs, also in the recomputation of a checkpoint."""
    model = tiny_model("llama", attention_dropout=0.5).train()
    ids = torch.cat(documents(), 1)

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(ids, position_ids=positions(), labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), model.get_input_embeddings().weight.grad

    with tritonpack.patch(model):
        loss, gradient = loss_and_gradient()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        again, recomputed = loss_and_gradient()
        model.eval()
        without, _ = loss_and_gradient()
    assert torch.equal(loss, again)
    torch.testing.assert_close(gradient, recomputed)
    assert abs(float(loss - without)) > 1e-6


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="got 'cuda'"):
        tritonpack.patch(tiny_model("llama"), backend="cuda")
    with pytest.raises(ValueError, match="got 'flash'"):
        tritonpack.patch(tiny_model("llama"), attention="flash")


def test_the_report_names_what_computes_attention() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with tritonpack.patch(model) as handle:
        assert (handle.report.runs, handle.report.backend) == ("blocked (auto, on cpu)", "auto")
        assert "backend blocked (auto, on cpu), in place of sdpa" in str(handle.report)
        model.to("meta")  # as another device: the report names what would run there
        assert "backend auto, in place of sdpa" in str(handle.report)
    model = tiny_model("llama", dtype=torch.float32)
    with tritonpack.patch(model, backend="reference") as handle:
        assert "backend reference, in place of sdpa" in repr(handle)
    for attention in ("tritonpack", "eager"):
        mamba = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2))
        with tritonpack.patch(mamba, attention=attention) as handle:
            assert str(handle.report).startswith("mamba: 2 layers; no attention in its layers\n")
    for attention in ("sdpa", "eager"):
        with tritonpack.patch(model, attention=attention) as handle:
            assert handle.report.runs == attention
            assert f"{attention} with a dense mask" in str(handle.report)
