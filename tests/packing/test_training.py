"""Packed training equals padded training: loss, gradients, and weights after transformers.Trainer."""

import pytest
import torch

from tritonpack import PackingCollator, patch

transformers = pytest.importorskip("transformers")

IGNORED = -100
VOCABULARY = 40
LENGTHS = (9, 1, 23, 4, 14, 31)


def tiny_llama(dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]


def pad(features):
    """A batch with one document per row, padded on the right."""
    longest = max(len(feature["input_ids"]) for feature in features)
    rows = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        ids = feature["input_ids"]
        labels = feature.get("labels", ids)
        missing = longest - len(ids)
        rows["input_ids"].append(ids + [0] * missing)
        rows["labels"].append(labels + [IGNORED] * missing)
        rows["attention_mask"].append([1] * len(ids) + [0] * missing)
    return {key: torch.tensor(value) for key, value in rows.items()}


def loss_and_gradients(model, batch, **kwargs):
    model.zero_grad()
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_equal_up_to_rounding(actual, expected):
    """Both are float64 sums of a few thousand terms in different orders; allow 100 roundings of the largest value."""
    for a, b in zip(actual, expected, strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= 100 * torch.finfo(torch.float64).eps * b.abs().max()


@pytest.mark.parametrize("pad_to", [None, 64], ids=["whole", "padded-row"])
@pytest.mark.parametrize("num_items", [None, 50], ids=["mean", "num_items_in_batch"])
def test_packed_loss_equals_padded_loss(pad_to, num_items):
    features = [feature | {"labels": feature["input_ids"]} for feature in documents()]
    features[2]["labels"] = [IGNORED] * 10 + features[2]["input_ids"][10:]  # a prompt without labels
    collator = PackingCollator(pad_to_multiple_of=pad_to, pad_token_id=None if pad_to is None else 0)
    kwargs = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    model = tiny_llama()
    expected = loss_and_gradients(model, pad(features), **kwargs)
    with patch(model):
        assert_equal_up_to_rounding(loss_and_gradients(model, collator(features), **kwargs), expected)


def test_unpatched_model_gives_another_loss():
    """Without the patch documents see each other, so the test above can fail."""
    model = tiny_llama()
    expected = loss_and_gradients(model, pad(documents()))
    naive = loss_and_gradients(model, PackingCollator()(documents()))
    with pytest.raises(AssertionError):
        assert_equal_up_to_rounding(naive, expected)
