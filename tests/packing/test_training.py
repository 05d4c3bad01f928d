"""Packed training equals padded training: loss and gradients of a patched model."""

import pytest
import torch

from tritonpack import PackingCollator, patch

transformers = pytest.importorskip("transformers")

IGNORED = -100
VOCABULARY = 40


def tiny_llama(dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def documents():
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (9, 1, 23, 4, 14, 31)]
    found = [{"input_ids": each, "labels": each} for each in ids]
    found[2]["labels"] = [IGNORED] * 10 + ids[2][10:]  # a prompt without labels
    return found


def pad(features):
    """A batch with one document per row, padded on the right."""
    longest = max(len(feature["input_ids"]) for feature in features)
    rows = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        ids = feature["input_ids"]
        missing = longest - len(ids)
        rows["input_ids"].append(ids + [0] * missing)
        rows["labels"].append(feature.get("labels", ids) + [IGNORED] * missing)
        rows["attention_mask"].append([1] * len(ids) + [0] * missing)
    return {key: torch.tensor(value) for key, value in rows.items()}


def loss_and_gradients(model, batch, **kwargs):
    model.zero_grad()
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("padding", [{}, {"pad_to_multiple_of": 64, "pad_token_id": 0}], ids=["whole", "padded-row"])
@pytest.mark.parametrize("num_items", [None, 50], ids=["mean", "num_items_in_batch"])
def test_packed_loss_equals_padded_loss(padding, num_items):
    """Up to 100 roundings of the largest value: both are float64 sums of a few thousand terms in different orders."""
    model, collator = tiny_llama(), PackingCollator(**padding)
    kwargs = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    expected = loss_and_gradients(model, pad(documents()), **kwargs)

    def is_equal():
        found = loss_and_gradients(model, collator(documents()), **kwargs)
        limits = [100 * torch.finfo(torch.float64).eps * each.abs().max() for each in expected]
        return all((a - b).abs().max() <= limit for a, b, limit in zip(found, expected, limits, strict=True))

    assert not is_equal(), "documents see each other without the patch"
    with patch(model):
        assert is_equal()
