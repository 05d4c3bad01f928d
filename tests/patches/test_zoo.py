"""The zoo holds every type, every type runs, and what its rows set is felt by documents of twenty tokens."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.test_every_model import mostly_slow

BUILT = [name for name in zoo.MODEL_TYPES if name not in zoo.UNBUILT]

# What a feature is widened to; only those that a row made narrow are tried.
WIDER = {
    "sliding_window": 64, "sliding_window_size": 64, "attention_window_size": 64, "local_attention": 128,
    "local_attention_window_len": 64, "window_size": 64, "keep_window_size": 64, "attention_chunk_size": 64,
    "index_topk": 64, "index_topk_blocks": 64, "indexer_budget": 64, "rel_extent": 64, "floor_scale": 64,
    "log_scaling_n_floor": 64, "attn_logit_softcapping": 64.0, "final_logit_softcapping": 64.0,
    "logits_soft_cap": 64.0,
}  # fmt: skip

# Types whose configuration names a window that their masks don't have.
WITHOUT_WINDOW = {"moshi", "nemotron_h"}

# Parameters whose part is over-looked most easily.
SUBTLE = ("sink", "A_log", "dt_bias", "time_", "conv", "decay", "recurrent", "relative_attention_bias")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return zoo.logits(model, model(**zoo.call(model, ids)))


@pytest.mark.fast("bart", "gemma3_text", "mistral", "gemma-bidirectional")
@mostly_slow([*BUILT, *zoo.VARIANTS])
def test_tokens_change_the_outputs_of_later_tokens(name: str) -> None:
    model = zoo.tiny_model(name)
    ids = zoo.documents((20,))[0]
    logits = zoo.logits(model, model(**zoo.call(model, ids), **zoo.DIFFERENTIABLE.get(name, {})))
    assert torch.isfinite(logits).all()
    assert sum(p.numel() for p in model.parameters()) < 500_000
    parameters = {n: p for n, p in model.named_parameters() if any(part in n for part in SUBTLE)}
    if parameters and name not in zoo.FORWARD_ONLY:
        gradients = torch.autograd.grad(logits.square().sum(), list(parameters.values()), allow_unused=True)
        dead = [n for n, g in zip(parameters, gradients, strict=True) if g is not None and not g.any()]
        assert not dead
    twin = zoo.tiny_model(name).state_dict()
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, twin[key])] == []
    with torch.no_grad():
        ids[0, 0] = zoo.FIRST_TOKEN + (ids[0, 0] - zoo.FIRST_TOKEN + 17) % 58
        assert (run(model, ids) - logits)[0, 3].abs().max() > 3e-3 * logits.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", [*BUILT, *zoo.VARIANTS])
@pytest.mark.fast("gemma2", "gpt_oss", "llama4_text", "mistral", "qwen3_next")
def test_every_small_window_or_limit_changes_the_outputs(name: str) -> None:
    config = zoo.tiny_config(name)
    fields = {field.name for field in dataclasses.fields(config)}
    narrow = [key for key in WIDER if key in fields and (getattr(config, key) or 64) < 64]
    ids = zoo.documents((20,))[0]
    expected = run(zoo.tiny_model(name), ids) if narrow else None
    for key in narrow:
        got = run(zoo.tiny_model(name, **{key: WIDER[key]}), ids)
        felt = (got - expected).abs().max() > 3e-3 * expected.abs().max()
        assert felt != (key == "sliding_window" and name in WITHOUT_WINDOW), key


@pytest.mark.slow
def test_every_row_is_of_a_model_type() -> None:
    known, waiting = set(), [CONFIG_MAPPING[name] for name in CONFIG_MAPPING]
    while waiting:
        config_class = waiting.pop()
        if config_class is not AutoConfig and config_class.model_type not in known:
            known.add(config_class.model_type)
            waiting += (config_class.sub_configs or {}).values()
    assert set(zoo.ROWS) <= known
    assert {row["model_type"] for row in zoo.VARIANTS.values()} <= set(zoo.MODEL_TYPES)
    assert set(zoo.UNBUILT) | zoo.FLOAT32_ONLY | zoo.FORWARD_ONLY <= set(zoo.MODEL_TYPES)


@contextlib.contextmanager
def shifted(model: PreTrainedModel) -> Iterator[None]:
    """A patch that keeps documents apart and gets every one of them wrong."""

    def more(module: torch.nn.Module, arguments: tuple[Tensor], output: Tensor) -> Tensor:
        return output + 1e-3

    with tritonpack.patch(model):
        hook = model.lm_head.register_forward_hook(more)
        try:
            yield
        finally:
            hook.remove()


@pytest.mark.slow
def test_verdicts_of_the_sweep() -> None:
    """Each of them, and from the cause that its name says."""
    packed = sweep.run("llama")
    assert (packed.verdict, packed.reason, set(packed.by_form)) == ("exact", "", set(sweep.FORMS))
    assert packed.worst < 1e-6
    stock = sweep.run("llama", patch=None, gradients=False)
    assert stock.by_form == {"position_ids": "leak", "without_cache": "exact", "all_ones_mask": "leak"}
    assert stock.verdict == "leak"
    wrong = sweep.run("llama", patch=shifted, forms=["position_ids", "two_rows"])
    assert wrong.by_form == {"position_ids": "inexact", "two_rows": "inexact"}
    assert sweep.run("prophetnet").verdict == "refused"
    assert sweep.run("gemma4_assistant").verdict == "unbuilt"
    broken = sweep.run("llama", patch=lambda model: contextlib.nullcontext(model.lm_head.register_forward_hook(1)))
    assert (broken.verdict, broken.by_form["position_ids"]) == ("error", "error")
