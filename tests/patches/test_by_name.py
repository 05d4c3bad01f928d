"""Models that are patched by attn_implementation="tritonpack": exact, or refused."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.models import VOCAB, Graphs, generate, tiny_model
from tests.patches.test_patching import (
    EXACT,
    FORMS,
    LENGTHS,
    alone,
    collator_kwargs,
    difference,
    documents,
    logits_and_gradients,
    positions,
    state,
)
from tritonpack.patches import parts
from tritonpack.patches.applied_patch import applied_to

NAME = "tritonpack"
FAMILIES = ("llama", "mistral", "qwen3", "gpt_oss")

every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family: str, **options: Any) -> PreTrainedModel:
    return zoo.tiny_model(family, dtype=torch.float64, **options)


@every_family
def test_packed_equals_alone(family: str) -> None:
    expected = alone(make(family))
    model = make(family, attn_implementation=NAME)
    for form, arguments in FORMS.items():
        call = {"input_ids": torch.cat(documents(), dim=1), **arguments()}
        assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) < EXACT, form


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone(family: str, side: str) -> None:
    expected = alone(make(family))
    width = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), width, dtype=torch.long), torch.zeros(len(LENGTHS), width, dtype=torch.long)
    spans = [slice(width - n, width) if side == "left" else slice(0, n) for n in LENGTHS]
    for row, (span, d) in enumerate(zip(spans, documents(), strict=True)):
        ids[row, span], mask[row, span] = d[0], 1

    def pick(out: list[Tensor]) -> Tensor:
        return torch.cat([out[0][row, span] for row, span in enumerate(spans)])[None]

    call = {"input_ids": ids, "attention_mask": mask}
    got = logits_and_gradients(make(family, attn_implementation=NAME), [call], pick)
    assert difference(expected, got) < EXACT


@pytest.mark.fast("-static-llama")
@every_family
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 4], ids=["", "left-padded"])
def test_generate(family: str, cache: str, padding: int) -> None:
    """A static cache counts its tokens in place, after the mask is made and before it is used."""
    ids, options = torch.cat([documents((9,))[0], documents((1, 9))[1]]), {"cache": cache, "padding": padding}
    expected, want = generate(make(family), ids, **options)
    got, have = generate(make(family, attn_implementation=NAME), ids, **options)
    assert torch.equal(expected, got)
    assert float((want - have).abs().max() / want.abs().max()) < EXACT


@every_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    expected = alone(make(family))
    model = make(family, attn_implementation=NAME).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    arguments = {"position_ids": positions(), **collator_kwargs()}
    logits = model(torch.cat(documents(), 1), use_cache=False, **arguments).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * weights).sum().backward()
    got = (logits.detach(), [p.grad for p in model.parameters() if p.requires_grad])
    assert difference(expected, got) < EXACT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # from the compiler
def test_one_graph_for_every_length() -> None:
    graphs = Graphs()
    model = tiny_model("mistral", dtype=torch.float32, num_hidden_layers=1)
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    for total in (12, 9, 20, 33):
        ids = torch.randint(3, VOCAB, (1, total))
        batch = {"input_ids": ids, "position_ids": (torch.arange(total) % 7)[None], "use_cache": False}
        assert torch.equal(compiled(**batch).logits, model(**batch).logits)
    assert graphs.count == 1


def test_saved_and_loaded(tmp_path: Any) -> None:
    model = make("mistral", attn_implementation=NAME)
    model.save_pretrained(tmp_path)
    assert not [path for path in tmp_path.glob("*.json") if NAME in path.read_text()]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME, dtype=torch.float64)
    assert loaded.config._attn_implementation == NAME
    call = {"input_ids": torch.cat(documents(), 1), "position_ids": positions()}
    assert float((loaded(**call).logits - model(**call).logits).abs().max()) < EXACT
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation=NAME)
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == NAME
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_model_that_has_the_name_is_patched() -> None:
    """It is patched as by `patch` at the end of its construction."""
    expected = alone(make("qwen3_next"))
    model = make("qwen3_next", attn_implementation=NAME)
    before = state(model)
    call = {"input_ids": torch.cat(documents(), 1), "position_ids": positions()}
    assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) < EXACT
    with tritonpack.patch(model) as handle:
        assert handle.report.replaced == NAME
        assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) < EXACT
    assert state(model) == before
    assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) < EXACT


@pytest.mark.parametrize("kind", ["falcon", "gptj", "git", "roformer", "openai-gpt"])
def test_attention_of_its_own_is_patched_by_name(kind: str) -> None:
    """Some models look the name up in a table of their own classes, and some ignore it."""
    expected = alone(make(kind))
    model = make(kind, attn_implementation=NAME)
    call = {"input_ids": torch.cat(documents(), 1), "position_ids": positions()}
    for named in (model, make(kind)):
        named.set_attn_implementation(NAME)
        assert difference(expected, logits_and_gradients(named, [call], lambda out: out[0])) < EXACT
    model.set_attn_implementation("eager")
    assert not applied_to(model)


@pytest.mark.parametrize("kind", ["xlstm", "cpmant", "blt", "deepseek_v4"])
def test_models_that_cannot_be_packed_are_refused_in_the_call(kind: str) -> None:
    model = zoo.tiny_model(kind, attn_implementation=NAME)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"on padded rows, unpatched.*was given attn_impl"):
        model(torch.arange(6, 10)[None])


def test_the_whole_model_has_one_patch() -> None:
    """Each model inside another is patched at the end of its construction. The whole model's patch replaces these."""
    model = make("bloom", attn_implementation=NAME)
    (applied,) = applied_to(model)
    assert applied.model is model
    assert not applied.below
    assert applied.by_name
    tritonpack.unpatch(model)
    assert not applied_to(model)


def test_set_attn_implementation_patches_and_unpatches() -> None:
    expected = alone(make("roformer"))
    model = make("roformer")
    before = state(model)
    call = {"input_ids": torch.cat(documents(), 1), "position_ids": positions()}
    for name in (NAME, "sdpa", NAME):
        model.set_attn_implementation(name)
        assert bool(applied_to(model)) == (name == NAME)
    model.set_attn_implementation("sdpa")
    assert state(model) == before
    model = make("llama")
    expected = alone(model)
    model.set_attn_implementation(NAME)
    assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) < EXACT
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert not applied_to(model)
    assert difference(expected, logits_and_gradients(model, [call], lambda out: out[0])) > 1e-3


def test_a_second_post_init_changes_nothing() -> None:
    """A subclass may call it at the end of its own constructor."""
    model = make("llama", attn_implementation=NAME)
    (applied,) = applied_to(model)
    model.post_init()
    assert applied_to(model) == [applied]
    tritonpack.unpatch(model)
    assert not applied_to(model)


def test_attention_named_by_part_gives_the_whole_model_one_patch() -> None:
    """A dictionary names the attention of parts. The whole model has one patch all the same."""
    model = make("gemma3", attn_implementation={"text_config": NAME, "vision_config": "eager"})
    (applied,) = applied_to(model)
    assert applied.model is model
    assert model.config.vision_config._attn_implementation == "eager"


def test_unsupported_models_are_refused_in_the_call() -> None:
    """In the call, because the model may be a part of one that can be packed; also in a direct call of its forward."""
    model = make("prophetnet", attn_implementation=NAME)
    ids = torch.cat(documents(), 1)
    for call in (model, model.forward, model.base_model):
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"prophetnet.*attn_implementation='tritonpack'"):
            call(ids)
    model.set_attn_implementation("eager")
    assert torch.equal(model(ids).logits, make("prophetnet")(ids).logits)


def test_a_name_that_is_written_into_a_configuration_is_refused() -> None:
    model = make("llama")
    model.config._attn_implementation = NAME
    with pytest.raises(ValueError, match=r"isn't patched.*patch this model, too, with tritonpack\.patch"):
        model(torch.cat(documents(), 1), position_ids=positions())


# Model types whose layers look up no attention function: transformers accepts any name for them and uses none.
NEVER_ASK = {
    "cpmant", "falcon_mamba", "mamba", "mamba2", "openai-gpt", "prophetnet", "reformer", "rwkv", "xlm", "xlnet",
    "xlstm",
}  # fmt: skip


USUAL = {
    "gemma2", "gemma3", "gpt_oss", "granite", "llama", "mistral", "olmo3", "phi3", "qwen3", "qwen3_moe",
}  # fmt: skip


@pytest.mark.slow
def test_every_type_is_exact_or_refuses() -> None:
    wrong: dict[tuple[str, str], float] = {}
    exact: dict[str, set[str]] = {"position_ids": set(), "collator": set()}
    for kind in zoo.MODEL_TYPES:
        if kind in zoo.UNBUILT or kind in NEVER_ASK:
            continue
        dtype = torch.float32 if kind in zoo.FLOAT32_ONLY else torch.float64
        stock, rows = zoo.tiny_model(kind, dtype=dtype), [d.clamp(min=zoo.FIRST_TOKEN) for d in documents()]
        with torch.no_grad():
            calls = [zoo.call(stock, d) for d in rows]
            expected = torch.cat([zoo.logits(stock, stock(**call, use_cache=False)) for call in calls], 1)
            try:
                model = zoo.tiny_model(kind, dtype=dtype, attn_implementation=NAME)
            except (ValueError, KeyError):  # KeyError: a table of classes by name
                continue
            for form, types in exact.items():
                try:
                    got = zoo.logits(model, model(**zoo.call(model, torch.cat(rows, 1)), **FORMS[form]()))
                except ValueError:
                    continue
                gap = float((got - expected).abs().max() / expected.abs().max())
                if gap < 1e-5:
                    types.add(kind)
                else:
                    wrong[kind, form] = gap
    assert not wrong
    for types in exact.values():
        assert len(types) >= 100
        assert types >= USUAL


def test_a_name_is_forgotten_with_its_configuration() -> None:
    """A model that is freed while patched leaves nothing for the next configuration at the same address."""
    gc.freeze()  # objects of other tests, which take seconds to look through
    try:
        model = tiny_model("llama")
        tritonpack.patch(model)
        key = id(model.config)
        assert parts._names[key][0]
        del model
        gc.collect()
        assert not parts._names[key][0]
    finally:
        gc.unfreeze()
