"""Every model type as users run it: wrapped, copied, generating, with a continued cache; results are stock's.

That every class is exact in every form, or refused, is in test_sweep.py.
"""

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.calls import alone, documents, relative, require_exact, state, without_dropout
from tests.patches.comparison import tolerance
from tests.patches.models import generate
from tests.patches.zoo import EXACT, PAIRS, tiny_pair_model
from tritonpack.patches.families import READS_PADDING

PAIR = "+"  # ends the name of an encoder with a decoder
NAMES = (*EXACT, *(name + PAIR for name in PAIRS))

REENTRANT_IS_WRONG = {"gemma3n", "gemma3n_text"}  # keys that layers share lose a gradient
RANDOM_IN_TRAINING = {"phimoe"}  # its router jitters
# Static caches give other tokens than dynamic ones (gpt_neo), a mask for all tokens is taken for padding (xlm), the
# window isn't kept while decoding (minimax), and text alone can't be continued (git).
GENERATE_DIFFERS = {"gpt_neo", "xlm", "minimax", "git"}
# Types whose ways to continue a cache are all right in stock transformers.
STOCK_IS_RIGHT = {
    "bailing_hybrid", "falcon_h1", "lara_mini", "lfm2", "lfm3", "olmo_hybrid", "opt", "qwen3_next", "zaya",
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def build(name: str) -> PreTrainedModel:
    return tiny_pair_model(name.removesuffix(PAIR)) if name.endswith(PAIR) else zoo.build(name)


def every_type(*fast: str) -> Callable[[Any], Any]:
    """The parameter `name`; those that aren't named here are slow."""

    def decorate(test: Any) -> Any:
        return pytest.mark.fast(*fast)(pytest.mark.parametrize("name", NAMES)(test))

    return decorate


# Options of patch(), the lengths of documents, and forms.
CALLS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]] = {
    "one document in a row": ({}, (9,), ("position_ids", "seq_idx_alone", "offsets_alone")),
    "eager": ({"attention": "eager"}, (7, 1, 3, 11), ("two_rows",)),
    "sdpa": ({"attention": "sdpa"}, (7, 1, 3, 11), ("two_rows", "padded_left")),
}


@pytest.mark.parametrize("case", CALLS)
@every_type(
    *(f"{name}-one document in a row" for name in ("bert", "gemma3n_text", "gpt2", "minimax", "whisper", "bart+")),
    *(f"{name}-{how}" for name in ("bart+", "falcon", "mamba2", "seamless_m4t_v2+") for how in ("eager", "sdpa")),
)
def test_packed_calls(name: str, case: str) -> None:
    options, lengths, tried = CALLS[case]
    model, pieces = build(name), documents(lengths)
    expected = alone(model, pieces)
    try:
        handle = tritonpack.patch(model, **options)
    except tritonpack.UnsupportedModelError:  # it doesn't support sdpa
        return
    with handle:
        require_exact(model, expected, *tried, pieces=pieces)


def checkpointed(model: Any, reentrant: bool) -> Any:
    if not model.supports_gradient_checkpointing:
        pytest.skip("can't be checkpointed")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def with_wrapped_layers(model: Any, implementation: CheckpointImpl) -> Any:
    """As FSDP and accelerate put torch's wrapper around layers."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = checkpoint_wrapper(layer, checkpoint_impl=implementation)
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "reentrant": lambda model: checkpointed(model, True),
    "checkpoints": lambda model: checkpointed(model, False),
    "wrapped layers": lambda model: with_wrapped_layers(model, CheckpointImpl.NO_REENTRANT),
    "reentrant wrapped layers": lambda model: with_wrapped_layers(model, CheckpointImpl.REENTRANT),
}
OF_LAYERS = ("llama", "mamba", "qwen3_next", "bloom")  # types whose layers are put into torch's wrapper
WRAPPED = [(wrapper, name) for wrapper in WRAPPERS for name in (OF_LAYERS if "wrapped" in wrapper else NAMES)]


@pytest.mark.parametrize(("wrapper", "name"), WRAPPED, ids=["-".join(one) for one in WRAPPED])
@pytest.mark.parametrize("first", ["patch", "wrapper"])
@pytest.mark.fast(
    "patch-checkpoints-encoder-decoder+", "wrapper-checkpoints-mamba2", "patch-reentrant-llama",
    "patch-reentrant-roformer", "wrapper-reentrant-mvp+", "wrapper-checkpoints-mistral", "wrapper-checkpoints-gpt_neox",
    "patch-reentrant wrapped layers-llama", "wrapper-wrapped layers-mamba", "patch-wrapped layers-qwen3_next",
)  # fmt: skip
def test_gradient_checkpointing(wrapper: str, name: str, first: str) -> None:
    if name in RANDOM_IN_TRAINING or (wrapper == "reentrant" and name in REENTRANT_IS_WRONG):
        pytest.skip("stock transformers differs from itself")
    model = without_dropout(build.__wrapped__(name))
    expected = alone(model)
    model.enable_input_require_grads()
    if first == "wrapper":
        WRAPPERS[wrapper](model.train())
    with tritonpack.patch(model):
        if first == "patch":
            require_exact(model, alone(model, gradients=False))
            WRAPPERS[wrapper](model.train())
        require_exact(model, expected, "without_cache")
        if name in OF_LAYERS:
            require_exact(model, expected, "padded_left", use_cache=False)
    for module in model.modules():
        assert "tritonpack" not in str(getattr(module, "checkpoint_fn", ""))


@every_type("bert", "roformer", "encoder-decoder+", "t5+")
def test_unpatching_copies_and_pickles(name: str) -> None:
    model = build(name)
    before, keys = state(model), list(model.state_dict())
    expected = alone(model, gradients=False)
    handle = tritonpack.patch(model)
    assert list(model.state_dict()) == keys
    copies: list[PreTrainedModel] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    handle.unpatch()
    assert state(model) == before
    for twin in copies:
        require_exact(twin, expected)
        tritonpack.unpatch(twin)
        with pytest.raises(ValueError, match="isn't patched"):
            tritonpack.unpatch(twin)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast(
    "bart+-dynamic", "encoder-decoder+-static", "gpt_oss-static", "qwen3_next-dynamic", "t5+-dynamic", "llama-static",
    "mistral-dynamic",
)  # fmt: skip
def test_generate(name: str, cache: str) -> None:
    """Two rows, one of them padded, unless padding changes what stock generates."""
    if name in GENERATE_DIFFERS:
        pytest.skip("stock transformers is at odds with itself")
    model, ids = build(name), torch.cat(documents((9, 9)))
    padding = -4 if name.endswith(PAIR) else 0 if name in READS_PADDING else 4
    options: dict[str, Any] = {"cache": cache, "padding": padding, "tokens": 3}
    try:
        expected, want = generate(model, ids, **options)
    except Exception as error:  # stock transformers fails, too
        pytest.skip(f"stock can't: {error}")
    if want.isnan().any():
        pytest.skip("stock makes NaN of padding in float64")
    for more in ({}, {"unpad": True}, {"share_prefixes": True}) if name in ("llama", "mistral") else ({},):
        with tritonpack.patch(model, **more):
            got, have = generate(model, ids, **options)
        assert torch.equal(expected, got)
        assert relative(want, have) < tolerance(model.dtype)


# Calls that continue a cache: new tokens of a row that was padded on the left, beside one without padding; and more
# tokens than the cache holds, without a mask, so that a mask for the new tokens alone would leave one place

IDS = torch.randint(6, 50, (1, 14), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 14, dtype=torch.int64).index_put_((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(0))
# A call's ids and mask, the number of tokens in the cache, and the places that the last row is compared with.
CONTINUED = ((IDS.repeat(2, 1), MASK, 12, slice(2, 14)), (IDS[:, :9], None, 4, slice(0, 9)))


def states(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


def continued(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cached: int) -> Tensor | None:
    """The states of the last row's new tokens; None for a model without a cache."""
    masks = ({}, {}) if mask is None else ({"attention_mask": mask[:, :cached]}, {"attention_mask": mask})
    cache = model(input_ids=ids[:, :cached], use_cache=True, **masks[0]).get("cache")
    if cache is None:
        return None
    return states(model(input_ids=ids[:, cached:], use_cache=True, cache=cache, **masks[1]))[-1]


@torch.no_grad()
@every_type("bert", "bloom", "gpt_oss", "jamba", "lfm2", "mpt", "opt", "qwen3_next")
def test_continued_text(name: str) -> None:
    """Of the head and of the model in it, which users may patch by itself, wherever stock transformers is right."""
    if name == "git" or name.endswith(PAIR):
        pytest.skip("its text alone can't be continued")
    head = build(name)
    base = getattr(head, head.base_model_prefix, None)
    models = [head] if base is None or "input_ids" not in inspect.signature(base.forward).parameters else [head, base]
    right = 0
    for model in models:
        for *call, cached, text in CONTINUED:
            try:
                stock = continued(model, *call, cached)
                whole = states(model(input_ids=IDS[:, text]))[0]
            except Exception:  # stock transformers fails
                continue
            if stock is None or not relative(whole[-len(stock) :], stock) < tolerance(model.dtype):
                continue
            right += 1
            for options in ({}, {"attention": "eager"}, *([{"unpad": True}] if name == "llama" else [])):
                with tritonpack.patch(model, **options):
                    got = continued(model, *call, cached)
                assert got is not None
                assert relative(whole[-len(stock) :], got) < tolerance(model.dtype), (type(model).__name__, cached)
    assert right == 4 or name not in STOCK_IS_RIGHT
