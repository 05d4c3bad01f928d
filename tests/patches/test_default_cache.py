"""Packed calls that leave `use_cache` at its default, as loops of one's own do: exact, or refused with the remedy."""

import pytest
import torch
import transformers

import tritonpack
from tests.patches import zoo

NAMES = [name for name in (*zoo.MODEL_TYPES, *zoo.VARIANTS) if name not in {*zoo.UNBUILT, *zoo.FLOAT32_ONLY}]
NAMES = [name for name in NAMES if not name.startswith("musicgen")]  # their tokens are rows of codebooks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast("llama", "mistral", "qwen3_next")
@pytest.mark.filterwarnings("ignore:unpatched-model")
def test_packed_equals_alone(name: str) -> None:
    model, documents = zoo.tiny_model(name, dtype=torch.float64), zoo.documents((7, 2, 12, 5))
    try:
        patch = tritonpack.patch(model)
    except ValueError:
        pytest.skip("refused")
    batch = tritonpack.PackingCollator()([{"input_ids": ids[0].tolist()} for ids in documents])
    batch.pop("labels")
    with patch:
        alone = torch.cat([model(input_ids=ids).logits[0] for ids in documents])
        for told in (("position_ids",), ("position_ids", "seq_idx", "cu_seq_lens_q"), ("seq_idx",)):
            got = model(batch["input_ids"], **{one: batch[one] for one in told}).logits[0]
            assert float((got - alone).abs().max() / alone.abs().max()) < 1e-5, told


@pytest.mark.parametrize("attention", ["tritonpack", "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_layers_that_write_twice_to_a_cache_are_refused(kind: str, attention: str) -> None:
    """Dory counts its layers twice if it has fewer than its input and output sections: stock transformers fails, too,
    or gives other logits with a cache than without."""
    if not hasattr(transformers, "DoryConfig"):
        pytest.skip("transformers has no Dory")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = transformers.DoryConfig(vocab_size=64, layer_types=[kind] * 2, sliding_window=5, **sizes)
    model = transformers.DoryForCausalLM(config).eval()
    documents = zoo.documents((7, 2, 12))
    batch = tritonpack.PackingCollator()([{"input_ids": ids[0].tolist()} for ids in documents])
    with tritonpack.patch(model, attention=attention):
        with pytest.raises(ValueError, match=r"DoryAttention changes its keys .* pass use_cache=False"):
            model(**batch)
        got = model(**batch, use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids in documents])
    assert torch.allclose(got, alone, rtol=1e-4, atol=1e-5)
