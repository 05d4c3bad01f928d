import numpy as np
import pytest

from tritonpack import CostModel

LLAMA_8B = {
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def test_from_shape_counts_operations_of_llama():
    model = CostModel.from_shape(**LLAMA_8B, attention_efficiency=1.0)
    embedding = 128256 * 4096
    assert model.per_token == 6 * (8_030_261_248 - embedding - 65 * 4096)  # without embedding and norms
    assert model.per_square == 32 * 7 * 4096


def test_from_config():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
    )
    assert CostModel.from_config(config) == CostModel.from_shape(**LLAMA_8B)
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=12)  # every sixth layer has no window
    assert gemma.layer_types.count("full_attention") == 2
    full = transformers.Gemma3TextConfig(num_hidden_layers=12, layer_types=["full_attention"] * 12)
    assert CostModel.from_config(gemma).per_square == pytest.approx(CostModel.from_config(full).per_square / 6)
    moe = transformers.Qwen3MoeConfig()
    dense = CostModel.from_config(moe)
    moe.num_experts_per_tok *= 2
    assert CostModel.from_config(moe).per_token > dense.per_token


def test_refuses_config_without_sizes():
    with pytest.raises(ValueError, match="object has no hidden_size or n_embd or d_model"):
        CostModel.from_config(object())


def test_refuses_sizes_that_differ_between_layers():
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"Gemma3nTextConfig.intermediate_size is \[.*not one number for all layers"):
        CostModel.from_config(transformers.Gemma3nTextConfig())


def test_fit():
    rng = np.random.default_rng(0)
    tokens, squares = rng.integers(1000, 32768, 40), rng.integers(10**6, 10**8, 40)
    model = CostModel.fit(tokens, squares, (3e-6 * tokens + 2e-10 * squares + 0.05) * rng.normal(1, 1e-3, 40))
    assert (model.per_token, model.per_square, model.per_step) == pytest.approx((3e-6, 2e-10, 0.05), rel=0.05)


def test_fit_has_no_negative_coefficient():
    rng = np.random.default_rng(1)
    tokens, squares = rng.integers(1000, 32768, 40), rng.integers(10**6, 10**8, 40)
    model = CostModel.fit(tokens, squares, np.maximum(3e-6 * tokens - 1e-10 * squares, 0))
    assert model.per_square == 0
    assert model.per_token > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([1, 2], [1, 2], [1, 2]), "the same 3 steps or more; got 2, 2 and 2"),
        (([1, 2, 3], [1, 2, 3, 4], [1, 2, 3]), "got 3, 4 and 3"),
        (([1, 2, float("nan")], [1, 2, 3], [1, 2, 3]), "tokens must be a row of finite numbers"),
        (([1, 2, 4], [1, 2, 4], [1, 2, 3]), "too similar to separate"),
        (([5, 5, 5], [1, 2, 4], [1, 2, 3]), "too similar to separate"),
        (([1, 2, 4], [1, 5, 4], [1, 2, -3]), "seconds must be at least 0; got -3"),
    ],
)
def test_refuses_to_fit(rows, message):
    with pytest.raises(ValueError, match=message):
        CostModel.fit(*rows)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1.0, 1.0), "per_token must be a number of at least 0; got -1.0"),
        ((1.0, float("nan")), "per_square must be .* got nan"),
        ((0.0, 0.0), "per_token or per_square above 0; got 0 for both"),
        ((1.0, 1.0, float("inf")), "per_step must be .* got inf"),
    ],
)
def test_refuses_numbers(numbers, message):
    with pytest.raises(ValueError, match=message):
        CostModel(*numbers)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer of at least 1; got 0"),
        ({"vocab_size": 1.5}, "vocab_size must be an integer of at least 1; got 1.5"),
        ({"attention_efficiency": 0}, "attention_efficiency must be above 0; got 0"),
    ],
)
def test_refuses_shapes(sizes, message):
    with pytest.raises(ValueError, match=message):
        CostModel.from_shape(**(LLAMA_8B | sizes))


@pytest.mark.parametrize(
    "model", [CostModel(57255.0, 1.9), CostModel(1e-6, 3e-11), CostModel(1.0, 0.0), CostModel(0.0, 2.0)]
)
@pytest.mark.parametrize(("capacity", "num_ranks"), [(512, 1), (32768, 8), (131072, 1024), (2**20, 4096)])
def test_whole_weights_keep_proportion_and_fit_64_bits(model, capacity, num_ranks):
    per_token, per_square = model.whole_weights(capacity, num_ranks)
    assert num_ranks * (per_token * capacity + per_square * capacity**2) < 2**62
    share = model.per_token * capacity / (model.per_token * capacity + model.per_square * capacity**2)
    whole = per_token * capacity / (per_token * capacity + per_square * capacity**2)
    assert whole == pytest.approx(share, abs=0.01)


def test_refuses_weights_too_far_apart():
    with pytest.raises(ValueError, match="too far apart"):
        CostModel(1e18, 1e-3).whole_weights(32768, 8)
