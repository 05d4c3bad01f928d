"""Every causal model type of transformers: exact in every form or refused with a reason; never a leak.

Refusals and intended differences from stock are listed here, so a test fails when a type becomes exact or stops being
exact. `python -m tests.patches.sweep` prints the same as a table.
"""

import copy
import functools
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.models import generate
from tritonpack.patches.applied_patch import REPLICATE, applied_to
from tritonpack.patches.families import READS_PADDING
from tritonpack.patches.forwards import is_shown

REFUSED = {
    "gemma4_unified_assistant": "drafts tokens from another model's cache",
    "prophetnet": "masks and position buckets of its own",
    "gemma-bidirectional": "sees both directions in a batch without padding",
    "blt": "run across documents",
    "cpmant": "position buckets of its own",
    "deepseek_v4": "pools keys across documents",
    "minimax_m3_vl_text": "counted from the beginning of the row",
    "reformer": "sorts the tokens of a row into buckets",
    "xlstm": "run over the whole row",
    "doge-experts": "its router mixes the tokens of a row",
}
# Forms that fail in stock transformers 5.24.
STOCK_FAILS = {
    # Its causal mask has room for one row.
    "xlnet-causal": {"two_rows", "two_rows_alone", "two_rows_padded", "padded_right", "padded_left"},
}
# Forms that lead to the same packing as another form. Gradients are compared for one of them here, and for all of them
# by the sweep.
SAID_AGAIN = {
    "with_cache", "all_ones_mask", "bool_mask", "offsets_alone", "seq_idx_alone", "segment_mask", "segments_alone",
    "two_rows_alone",
}  # fmt: skip
REENTRANT_IS_WRONG = {"gemma3n", "gemma3n_text"}  # keys that layers share lose a gradient
RANDOM_IN_TRAINING = {"phimoe"}  # its router jitters
# Static caches give other tokens than dynamic ones (gpt_neo), a mask for all tokens is taken for padding (xlm), the
# window isn't kept while decoding (minimax), and text alone can't be continued (git).
GENERATE_DIFFERS = {"gpt_neo", "xlm", "minimax", "git"}

BUILT = [name for name in zoo.MODEL_TYPES if name not in zoo.UNBUILT]
EXACT = [name for name in BUILT if name not in REFUSED]

# Types that differ most from each other. The others run in `make nightly`.
FEW = {
    "bart", "bert", "big_bird", "bloom", "deepseek_v3", "doge", "falcon", "falcon_h1", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "git", "gpt2", "gpt_neo", "gpt_oss", "kimi_linear", "lfm2", "llama",
    "llama4_text", "mamba2", "minimax", "mistral", "mllama", "modernbert-decoder", "nemotron_h", "qwen3_5_text",
    "recurrent_gemma", "roformer", "rwkv", "whisper", "xlm", "xlnet", "zamba2",
    *REFUSED,
}  # fmt: skip


def mostly_slow(names: Iterable[str]) -> pytest.MarkDecorator:
    """The parameter `name`; names outside of `FEW` are slow."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=slow) for n in names])


every_exact_type = pytest.mark.parametrize("name", EXACT)


def build(name: str) -> PreTrainedModel:
    return zoo.tiny_model(name, dtype=torch.float32 if name in zoo.FLOAT32_ONLY else torch.float64)


def test_number_of_model_types() -> None:
    """transformers 5.24 has 196 types; other versions have other numbers."""
    assert len(EXACT) >= 148
    assert {*REFUSED} <= {*BUILT, *zoo.VARIANTS}


@mostly_slow([*BUILT, *zoo.VARIANTS])
@pytest.mark.fast("modernbert-decoder", "xlnet", "xlm", "xlstm")
def test_packed_equals_alone_or_is_refused(name: str) -> None:
    forms = [form for form in sweep.FORMS if form not in STOCK_FAILS.get(name, ())]
    row = sweep.run(name, forms=forms, gradients=[form for form in forms if form not in SAID_AGAIN])
    if name in REFUSED:
        assert row.verdict == "refused"
        assert REFUSED[name] in row.reason
    else:
        assert (row.verdict, row.reason) == ("exact", "")
        assert len(row.by_form) == len(forms)


@mostly_slow(EXACT)
@pytest.mark.fast("bert", "gemma3n_text", "gpt2", "minimax", "mistral", "whisper")
def test_one_document_in_a_row_equals_alone(name: str) -> None:
    """A sampler may fill a row with one long document. In every form it gives what it gives alone."""
    model = build(name)
    ids = zoo.documents((9,))[0]
    offsets = {"cu_seq_lens_q": torch.tensor([0, 9]), "max_length_q": 9}
    told: dict[str, dict[str, Any]] = {
        "position_ids": {"position_ids": torch.arange(9)[None]},
        "seq_idx": {"seq_idx": torch.zeros(1, 9, dtype=torch.int32)},
        "offsets": offsets | {"cu_seq_lens_k": offsets["cu_seq_lens_q"], "max_length_k": 9},
    }
    with torch.no_grad():
        expected = zoo.logits(model, model(**zoo.call(model, ids), use_cache=False))
        with tritonpack.patch(model):
            for form, arguments in told.items():
                got = zoo.logits(model, model(**zoo.call(model, ids), **arguments))
                assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5, form


@pytest.mark.slow
@every_exact_type
def test_with_transformers_own_attention(name: str) -> None:
    model, documents = build(name), zoo.documents(sweep.LENGTHS)
    expected = sweep.alone(model, documents)
    with tritonpack.patch(model, attention="eager"):
        found = sweep.judge(model, "two_rows", documents, expected)
        assert (found.verdict, found.reason) == ("exact", "")
    refusal = ""
    try:
        with tritonpack.patch(model, attention="sdpa"):
            found = sweep.judge(model, "two_rows", documents, expected)
    except tritonpack.UnsupportedModelError as error:
        refusal = str(error)
    if refusal:
        assert "doesn't support sdpa" in refusal
    else:
        assert (found.verdict, found.reason) == ("exact", "")


@every_exact_type
@pytest.mark.fast("bert", "deepseek_v3", "gemma2", "llama", "mamba2", "qwen3_next")
def test_exact_types_are_patched_without_a_trial(name: str) -> None:
    """`exact_classes.csv` lists the classes of the types that are exact here, and none that is refused."""
    assert is_shown(type(zoo.tiny_model(name)))


build_for_both = functools.lru_cache(maxsize=1)(build)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every_exact_type
@pytest.mark.filterwarnings("ignore")
def test_generate_as_stock(name: str, cache: str) -> None:
    """Two rows, one of them padded on the left, unless padding changes what stock generates."""
    if name in GENERATE_DIFFERS:
        pytest.skip("stock transformers is at odds with itself")
    model, ids = build_for_both(name), torch.cat(zoo.documents((9, 9)))
    options: dict[str, Any] = {"cache": cache, "padding": 0 if name in READS_PADDING else 4, "tokens": 3}
    try:
        expected, want = generate(model, ids, **options)
    except Exception as error:  # stock transformers fails, too
        pytest.skip(f"stock can't: {error}")
    if want.isnan().any():
        pytest.skip("stock makes NaN of padding in float64")
    with tritonpack.patch(model):
        got, have = generate(model, ids, **options)
    assert torch.equal(expected, got)
    assert float((want - have).abs().max() / want.abs().max()) < sweep.tolerance(model)


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    configs = [model.config, *(getattr(model.config, part) for part in model.config.sub_configs or {})]
    for holder in (*model.modules(), *configs):
        for key, value in list(vars(holder).items()):
            if "drop" in key and isinstance(value, float):
                setattr(holder, key, 0.0)
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
    return model


@pytest.mark.slow
@every_exact_type
@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing(name: str) -> None:
    if name in RANDOM_IN_TRAINING:
        pytest.skip("stock transformers differs from itself")
    model = without_dropout(build(name))
    if not model.supports_gradient_checkpointing:
        pytest.skip("can't be checkpointed")
    documents = zoo.documents(sweep.LENGTHS)
    alone = sweep.alone(model, documents)
    expected = alone.values, alone.gradients
    model.train().enable_input_require_grads()
    for reentrant in (False,) if name in REENTRANT_IS_WRONG else (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with tritonpack.patch(model):
            logits = sweep.logits(model, sweep.FORMS["without_cache"](documents))
            weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
            (logits * weights).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        assert sweep.difference(expected, (logits.detach(), gradients)) < sweep.tolerance(model), reentrant


def state(model: nn.Module) -> dict[str, Any]:
    """All objects that a patch may change, by identity."""
    registries = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    return {
        name: [dict(getattr(module, registry)) for registry in registries]
        + [module.__dict__.get(own) for own in ("forward", "_gradient_checkpointing_func", REPLICATE)]
        + [getattr(getattr(module, "config", None), "_attn_implementation_internal", None)]
        for name, module in model.named_modules()
    }


@every_exact_type
@pytest.mark.fast("bert", "roformer")
def test_unpatching_copies_and_pickles(name: str) -> None:
    model = build(name)
    before, documents = state(model), zoo.documents(sweep.LENGTHS)
    keys = list(model.state_dict())
    handle = tritonpack.patch(model)
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    copies: list[PreTrainedModel] = [copy.deepcopy(model), pickle.load(file)]
    handle.unpatch()
    assert state(model) == before
    expected: Tensor = sweep.alone(model, documents, gradients=False).values
    for twin in copies:
        logits = sweep.logits(twin, sweep.FORMS["position_ids"](documents)).detach()
        assert sweep.difference((expected, []), (logits, [])) < sweep.tolerance(model)
        tritonpack.unpatch(twin)
        assert applied_to(twin) == []
