"""Every model type as users run it: wrapped, copied, generating, with a continued cache; results are stock's.

That every class is exact in every form, or refused, is in test_sweep.py.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.calls import alone, documents, relative, require_exact, without_dropout
from tests.patches.models import generate
from tests.patches.zoo import EXACT, PAIRS, tolerance
from tritonpack.patches.families import READS_PADDING

PAIR = "+"  # ends the name of an encoder with a decoder
NAMES = (*EXACT, *(name + PAIR for name in PAIRS))


build = functools.lru_cache(maxsize=1)(zoo.build)


def packed(name: str, *tried: str, lengths: tuple[int, ...] = (7, 1, 3, 11), **options: Any) -> None:
    model, pieces = build(name), documents(lengths)
    expected = alone(model, pieces)
    try:
        handle = tritonpack.patch(model, **options)
    except tritonpack.UnsupportedModelError:
        pytest.skip("it doesn't support sdpa")
    with handle:
        require_exact(model, expected, *tried, pieces=pieces)


REENTRANT_IS_WRONG = {"gemma3n", "gemma3n_text"}  # keys that layers share lose a gradient
RANDOM_IN_TRAINING = {"phimoe"}  # its router jitters
OF_LAYERS = ("llama", "mamba", "qwen3_next", "bloom")  # types whose layers are put into torch's wrapper


def checkpointed(name: str, *, reentrant: bool, layers: bool = False) -> None:
    """Enabled before the patch and after it; or torch's wrapper around layers, as FSDP and accelerate use it."""
    if name in RANDOM_IN_TRAINING or (reentrant and name in REENTRANT_IS_WRONG):
        pytest.skip("stock transformers differs from itself")

    def wrap(model: Any) -> None:
        for module in model.train().modules() if layers else ():
            for i, layer in enumerate(module if isinstance(module, nn.ModuleList) else ()):
                kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
                module[i] = checkpoint_wrapper(layer, checkpoint_impl=kind)
        if not layers:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    ways = ({}, {"unpad": True}, {"share_prefixes": True}) if name in ("llama", "mistral") else ({},)
    for options, patch_first in itertools.product(ways, (False, True)):
        model = without_dropout(build.__wrapped__(name))
        if not model.supports_gradient_checkpointing:
            pytest.skip("can't be checkpointed")
        expected = alone(model)
        model.enable_input_require_grads()
        if not patch_first:
            wrap(model)
        with tritonpack.patch(model, **options):
            if patch_first:
                require_exact(model, alone(model, gradients=False))
                wrap(model)
            require_exact(model, expected, "without_cache")
            if name in (*OF_LAYERS, "mistral"):
                require_exact(model, expected, "padded_left", use_cache=False)
        for module in model.modules():
            assert "tritonpack" not in str(getattr(module, "checkpoint_fn", ""))


# Static caches give other tokens than dynamic ones (gpt_neo), a mask for all tokens is taken for padding (xlm), the
# window isn't kept while decoding (minimax), and text alone can't be continued (git).
GENERATE_DIFFERS = {"gpt_neo", "xlm", "minimax", "git"}


def generated(name: str, cache: str) -> None:
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
# Types whose ways to continue a cache are all right in stock transformers.
STOCK_IS_RIGHT = {
    "bailing_hybrid", "falcon_h1", "lara_mini", "lfm2", "lfm3", "olmo_hybrid", "opt", "qwen3_next", "zaya",
}  # fmt: skip


def states(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


def continuation(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cached: int) -> Tensor | None:
    """The states of the last row's new tokens; None for a model without a cache."""
    masks = ({}, {}) if mask is None else ({"attention_mask": mask[:, :cached]}, {"attention_mask": mask})
    cache = model(input_ids=ids[:, :cached], use_cache=True, **masks[0]).get("cache")
    if cache is None:
        return None
    return states(model(input_ids=ids[:, cached:], use_cache=True, cache=cache, **masks[1]))[-1]


@torch.no_grad()
def continued(name: str) -> None:
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
                stock = continuation(model, *call, cached)
                whole = states(model(input_ids=IDS[:, text]))[0]
            except Exception:  # stock transformers fails
                continue
            if stock is None or not relative(whole[-len(stock) :], stock) < tolerance(model.dtype):
                continue
            right += 1
            for options in ({}, {"attention": "eager"}, *([{"unpad": True}] if name == "llama" else [])):
                with tritonpack.patch(model, **options):
                    got = continuation(model, *call, cached)
                assert got is not None
                assert relative(whole[-len(stock) :], got) < tolerance(model.dtype), (type(model).__name__, cached)
    assert right == 4 or name not in STOCK_IS_RIGHT


# A way to use a model, and the types that it is tried for in the ordinary tier.
USES: dict[str, tuple[Callable[[str], None], str]] = {
    "one document in a row": (
        lambda name: packed(name, "position_ids", "seq_idx_alone", "offsets_alone", lengths=(9,)),
        "bert gemma3n_text gpt2 minimax whisper bart+",
    ),
    "eager": (lambda name: packed(name, "two_rows", attention="eager"), "bart+ falcon mamba2 seamless_m4t_v2+"),
    "sdpa": (
        lambda name: packed(name, "two_rows", "padded_left", attention="sdpa"), "bart+ falcon mamba2 seamless_m4t_v2+"
    ),
    "checkpoints": (
        lambda name: checkpointed(name, reentrant=False), "encoder-decoder+ mamba2 mistral gpt_neox"
    ),
    "reentrant checkpoints": (lambda name: checkpointed(name, reentrant=True), "llama roformer mvp+"),
    "wrapped layers": (lambda name: checkpointed(name, reentrant=False, layers=True), "mamba qwen3_next"),
    "reentrant wrapped layers": (lambda name: checkpointed(name, reentrant=True, layers=True), "llama"),
    "dynamic cache": (lambda name: generated(name, "dynamic"), "bart+ qwen3_next t5+ mistral"),
    "static cache": (lambda name: generated(name, "static"), "encoder-decoder+ gpt_oss llama"),
    "continued text": (continued, "bert bloom gpt_oss jamba lfm2 mpt opt qwen3_next"),
}  # fmt: skip
TRIED = [(use, name) for use in USES for name in (OF_LAYERS if "wrapped" in use else NAMES)]


@pytest.mark.parametrize(("use", "name"), TRIED, ids=map("-".join, TRIED))
@pytest.mark.fast(*(f"{use}-{name}" for use, (_, fast) in USES.items() for name in fast.split()))
def test_every_type(use: str, name: str) -> None:
    USES[use][0](name)
