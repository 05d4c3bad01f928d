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


def pad(features):
    """A batch with one document per row, padded on the right."""
    longest = max(len(feature["input_ids"]) for feature in features)
    rows = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        missing = longest - len(feature["input_ids"])
        rows["input_ids"].append(feature["input_ids"] + [0] * missing)
        rows["labels"].append(feature["labels"] + [IGNORED] * missing)
        rows["attention_mask"].append([1] * (longest - missing) + [0] * missing)
    return {key: torch.tensor(value) for key, value in rows.items()}


def learned(model, **batch):
    """The loss and its gradients."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("padding", [{}, {"pad_to_multiple_of": 64}], ids=["whole", "padded-row"])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(50)}], ids=["mean", "num_items_in_batch"])
def test_packed_loss_equals_padded_loss(padding, options):
    """Up to 100 roundings of the largest value: both are float64 sums of a few thousand terms in different orders."""
    ids = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in (9, 1, 23, 4, 14, 31)]
    documents = [{"input_ids": each, "labels": each} for each in ids]
    documents[2]["labels"] = [IGNORED] * 10 + ids[2][10:]  # a prompt without labels
    model = tiny_llama()
    expected = learned(model, **pad(documents), **options)

    def is_equal():
        found = learned(model, **PackingCollator(**padding)(documents), **options)
        limits = [100 * torch.finfo(torch.float64).eps * each.abs().max() for each in expected]
        return all((a - b).abs().max() <= limit for a, b, limit in zip(found, expected, limits, strict=True))

    assert not is_equal(), "documents see each other without the patch"
    with patch(model):
        assert is_equal()
