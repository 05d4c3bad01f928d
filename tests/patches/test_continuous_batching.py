"""Continuous batching of a patched model: the tokens equal stock's, and packing works again afterwards."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache

import tritonpack
from tests.patches.models import tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16, 17, 18, 19]]
GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1)


def options() -> dict[str, Any]:
    return {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)}


def generated(model: Any) -> list[list[int]]:
    made = model.generate_batch(PROMPTS, generation_config=GREEDY, **options())
    assert len(made) == len(PROMPTS)
    return [one.generated_tokens for one in made.values()]


@contextmanager
def session(model: PreTrainedModel) -> Iterator[Any]:
    with model.continuous_batching_context_manager(generation_config=GREEDY, **options()) as manager:
        yield manager


def packed_gap(model: PreTrainedModel) -> float:
    """The largest difference of logits between packed documents and each alone."""
    documents = [torch.tensor([prompt]) for prompt in PROMPTS]
    places = torch.cat([torch.arange(document.numel()) for document in documents])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat(documents, dim=1), position_ids=places).logits
        alone = torch.cat([model(input_ids=document).logits for document in documents], dim=1)
    return float((packed - alone).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("mistral", "eager")])
def test_tokens_are_those_of_stock_and_packing_goes_on(family: str, attention: str) -> None:
    model = tiny_model(family, dtype=torch.float32, attention=attention)
    expected = generated(model)
    assert expected == [
        model.generate(torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    with tritonpack.patch(model):
        for _ in range(2):
            assert generated(model) == expected
            assert packed_gap(model) < 1e-5
    assert model.config._attn_implementation == attention
    assert "init_continuous_batching" not in vars(model)
    assert generated(model) == expected
    assert packed_gap(model) > 1e-2  # so the comparison above can fail


@pytest.mark.slow
def test_model_patched_by_name() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = generated(model)
    by_name = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="tritonpack").eval()
    by_name.load_state_dict(model.state_dict())
    assert generated(by_name) == expected
    assert by_name.config._attn_implementation == "tritonpack"
    assert packed_gap(by_name) < 1e-5


@pytest.mark.slow
def test_a_copy_generates_by_itself() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = generated(model)
    with tritonpack.patch(model):
        twin = copy.deepcopy(model)
        with session(twin):
            assert twin.config._attn_implementation == "sdpa"
            assert packed_gap(model) < 1e-5  # has a config of its own
        assert generated(twin) == expected
        assert packed_gap(twin) < 1e-5


@pytest.mark.slow
def test_training_during_a_session_is_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with (
        tritonpack.patch(model),
        session(model),
        pytest.raises(ValueError, match=r"'sdpa' since this model was patched.*stop its manager first"),
    ):
        packed_gap(model)
    with tritonpack.patch(model):
        assert packed_gap(model) < 1e-5


def test_a_session_that_fails_to_start_changes_nothing() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    broken = GenerationConfig(max_new_tokens=6, num_beams="x")
    with tritonpack.patch(model):
        with pytest.raises(TypeError):
            model.init_continuous_batching(generation_config=broken, nonsense=1)
        assert packed_gap(model) < 1e-5


@pytest.mark.slow
def test_unpatching_during_a_session() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    expected = generated(model)
    handle = tritonpack.patch(model)
    with session(model):
        handle.unpatch()
    assert model.config._attn_implementation == "sdpa"
    assert generated(model) == expected


def test_patching_during_a_session_is_refused_in_the_call() -> None:
    """The manager was made for another name of the attention than the model has now."""
    model = tiny_model("llama", dtype=torch.float32)
    cache = object.__new__(PagedAttentionCache)
    with tritonpack.patch(model), pytest.raises(ValueError, match="patched while continuous batching was running"):
        model(input_ids=torch.tensor([[5, 6]]), cache=cache)
