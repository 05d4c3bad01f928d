"""Models that don't predict the next token: the loss of a packed batch equals the loss of the padded batch."""

import pytest
import torch

from tests.packing.test_training import assert_equal_up_to_rounding, loss_and_gradients
from tritonpack import PackingCollator, patch

transformers = pytest.importorskip("transformers")

IGNORED = -100
VOCABULARY = 40
LENGTHS = (9, 1, 23, 4, 14)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


def tiny_bert(head):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=64, num_labels=5)
    return getattr(transformers, f"BertFor{head}")(config).double().eval()


def documents(num_labels):
    generator = torch.Generator().manual_seed(1)

    def row(high, length):
        return torch.randint(0, high, (length,), generator=generator)

    for length in LENGTHS:
        labels = row(num_labels, length)
        labels[1::3] = IGNORED  # not the first: the first token has a label, too
        yield {"input_ids": row(VOCABULARY, length), "labels": labels, "token_type_ids": row(2, length)}


def padded(features):
    filling = {"input_ids": 0, "labels": IGNORED, "token_type_ids": 0}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([one[name] for one in features], True, value)
        for name, value in filling.items()
    }
    lengths = torch.tensor([len(one["input_ids"]) for one in features])
    return batch | {"attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long()}


def whole(found):
    """The loss, and all gradients in one tensor: softmax ignores key biases, so their gradients are only rounding."""
    loss, *gradients = found
    return [loss, torch.cat([gradient.flatten() for gradient in gradients])]


@pytest.mark.parametrize("pad_to", [None, 16])
@pytest.mark.parametrize(("head", "num_labels"), [("MaskedLM", VOCABULARY), ("TokenClassification", 5)])
def test_packed_loss_of_tokens_equals_padded_loss(head, num_labels, pad_to):
    model, features = tiny_bert(head), list(documents(num_labels))
    expected = whole(loss_and_gradients(model, padded(features)))
    pad = {} if pad_to is None else {"pad_to_multiple_of": pad_to, "pad_token_id": 0}
    batch = PackingCollator(objective="tokens", **pad)(features)
    assert (batch["labels"][0, batch["cu_seq_lens_q"][:5].long()] != IGNORED).all(), "first labels count"
    with patch(model):
        assert_equal_up_to_rounding(whole(loss_and_gradients(model, batch)), expected)


def test_causal_objective_gives_another_loss():
    """The objective changes these losses, so the test above can fail."""
    model, features = tiny_bert("MaskedLM"), list(documents(VOCABULARY))
    expected = loss_and_gradients(model, padded(features))
    with patch(model):
        loss, *_ = loss_and_gradients(model, PackingCollator()(features))
    assert (loss - expected[0]).abs() > 1e-3
