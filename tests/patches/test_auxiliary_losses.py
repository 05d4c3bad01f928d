"""Other code that reads a model's mask: losses of routers, and embeddings that are scaled by the mask.

All of it gets a mask of 0 and 1, in whatever way the call tells documents apart, and leaves out padding.
"""

import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.sweep import difference
from tests.small_copies.comparison import tolerance

LENGTHS = (7, 1, 3, 11)
EXACT = tolerance(torch.float64)  # routers' losses are computed in float32
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "jamba", "dbrx", "olmoe", "phimoe")
PAD = 0


def model_of(family: str) -> PreTrainedModel:
    model = zoo.tiny_model(family, dtype=torch.float64, pad_token_id=PAD)
    for name in ("router_aux_loss_coef", "router_aux_coef", "aux_loss_coef"):
        for config in (model.config, model.config.get_text_config()):
            if hasattr(config, name):
                setattr(config, name, 1.0)  # large enough to show in the gradient
        if hasattr(model, name):
            setattr(model, name, 1.0)
    return model


def labels_of(ids: Tensor, begins: list[int]) -> Tensor:
    labels = ids.clone()
    labels[0, begins] = -100
    labels[ids == PAD] = -100
    return labels


def padded(pieces: list[Tensor]) -> dict[str, Any]:
    ids = nn.utils.rnn.pad_sequence([piece[0] for piece in pieces], batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.where(ids != PAD, -100)}


def calls(pieces: list[Tensor]) -> dict[str, dict[str, Any]]:
    """One packed row, with and without padding at its end, with documents told in every way."""
    ids, lengths = torch.cat(pieces, dim=1), torch.tensor([piece.shape[1] for piece in pieces])
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    numbers = torch.arange(1, len(pieces) + 1).repeat_interleave(lengths)[None]
    begins = [0, *lengths.cumsum(0).tolist()]
    offsets = torch.tensor(begins, dtype=torch.int32)
    count = 5
    filled = torch.cat([ids, torch.full((1, count), PAD)], dim=1)
    zeros, own = torch.zeros(1, count, dtype=torch.long), torch.arange(count)[None]
    whole = {"input_ids": ids, "labels": labels_of(ids, begins[:-1])}
    longer = {"input_ids": filled, "labels": labels_of(filled, begins[:-1])}
    filled_offsets = torch.cat([offsets, offsets.new_tensor([int(offsets[-1]) + count])])
    return {
        "position_ids": {**whole, "position_ids": places},
        "offsets": {**whole, "cu_seq_lens_q": offsets},
        "numbered mask": {**whole, "attention_mask": numbers},
        "numbered mask and positions": {**whole, "attention_mask": numbers, "position_ids": places},
        "padding by a mask": {**longer, "attention_mask": torch.cat([numbers, zeros], 1)},
        "padding as positions of 0": {**longer, "position_ids": torch.cat([places, zeros], 1)},
        "padding as a document": {**longer, "position_ids": torch.cat([places, own], 1)},
        "padding with an offset": {**longer, "cu_seq_lens_q": filled_offsets},
        "padding as positions of 0, with an offset": {
            **longer, "position_ids": torch.cat([places, own], 1), "cu_seq_lens_q": filled_offsets,
        },
    }  # fmt: skip


FORMS = tuple(calls(zoo.documents(LENGTHS)))


def loss_and_gradients(model: nn.Module, call: dict[str, Any]) -> tuple[Tensor, list[Tensor | None]]:
    output = model(**call, output_router_logits=True, use_cache=False)
    assert output.aux_loss is not None
    parameters = list(model.parameters())
    return torch.stack([output.loss, output.aux_loss]).detach().double(), list(
        torch.autograd.grad(output.loss, parameters, allow_unused=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast("gpt_oss", "phimoe")
def test_router_loss_equals_padded_training(family: str) -> None:
    model, pieces = model_of(family), zoo.documents(LENGTHS)
    expected = loss_and_gradients(model, padded(pieces))
    with tritonpack.patch(model):
        assert difference(expected, loss_and_gradients(model, padded(pieces))) < EXACT
        for form, call in calls(pieces).items():
            assert difference(expected, loss_and_gradients(model, call)) < EXACT, form


def test_documents_of_padding_tokens_inside_a_row_count() -> None:
    """Only tokens that fill a row up are padding, and a row is never all padding."""
    model, pieces = model_of("mixtral"), zoo.documents((7, 4))
    middle = torch.cat([pieces[0], torch.full((1, 3), PAD), pieces[1]], dim=1)
    places = torch.cat([torch.arange(n) for n in (7, 3, 4)])[None]
    ones = torch.ones_like(middle)
    with tritonpack.patch(model):
        for ids, told in ((middle, {"position_ids": places}), (middle * 0, {"position_ids": places})):
            got = model(ids, **told, output_router_logits=True).aux_loss
            if ids is middle:
                expected = model(ids, **told, attention_mask=ones, output_router_logits=True).aux_loss
                assert float((got - expected).abs()) < EXACT
            assert got.isfinite()


def test_forward_replaced_after_patching_is_refused() -> None:
    """Liger-Kernel replaces forwards. A wrapper that calls ours, such as accelerate's, replaces nothing."""
    model, pieces = model_of("mixtral"), zoo.documents(LENGTHS)
    call = calls(pieces)["numbered mask"]
    with tritonpack.patch(model):
        expected = model(**call, output_router_logits=True).aux_loss
        own = model.forward
        model.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
        assert torch.equal(model(**call, output_router_logits=True).aux_loss, expected)
        model.forward = types.MethodType(type(model).forward, model)
        assert model(**call).logits.isfinite().all()
        with pytest.raises(ValueError, match=r"the forward of MixtralForCausalLM was replaced since .* was patched"):
            model(**call, output_router_logits=True)
        model.forward = own


def test_embeddings_scaled_by_the_mask_equal_alone() -> None:
    model, pieces = retriever(), zoo.documents(LENGTHS)
    expected = torch.cat([model(ids).embeddings for ids in pieces], dim=1)
    numbers = torch.arange(1, 5).repeat_interleave(torch.tensor(LENGTHS))[None]
    with tritonpack.patch(model):
        got = model(torch.cat(pieces, dim=1), attention_mask=numbers).embeddings
    assert float((got - expected).abs().max()) < EXACT


def retriever() -> PreTrainedModel:
    import transformers

    from tests.small_copies.shrink import shrink
    from tests.small_copies.small_copy import spread

    torch.manual_seed(0)
    config = shrink(transformers.ColModernVBertConfig())
    model = transformers.ColModernVBertForRetrieval._from_config(config)
    spread(model, torch.Generator().manual_seed(0))
    return model.double().eval()
