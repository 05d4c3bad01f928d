"""Models that tritonpack doesn't know: tried on a few tokens when they are patched."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    EsmConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_causal_mask

import tritonpack
from tests.patches import zoo
from tests.patches.models import VOCAB
from tritonpack.patches import probe
from tritonpack.testing import check_isolation


class StrangerConfig(PreTrainedConfig):
    model_type = "stranger"
    hidden_size: int = 16
    num_hidden_layers: int = 1
    vocab_size: int = VOCAB
    uses_mask: bool = True
    extra_keys: int = 0


class Stranger(PreTrainedModel):
    """A model of somebody's own: its attention knows no interface and adds the mask to its scores."""

    config_class = StrangerConfig
    _supports_sdpa = True

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor]:
        hidden = self.embed(input_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids, allow_is_causal_skip=False)
        query, key, value = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        scores = query @ key.transpose(2, 3)
        if self.config.uses_mask and isinstance(mask, Tensor) and mask.dtype == torch.bool:  # stock sdpa's
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif self.config.uses_mask:
            scores = scores + mask
        else:
            scores = scores + torch.full_like(scores[0, 0], -1e9).triu(1)
        return ((scores.softmax(-1) @ value)[:, 0],)


def stranger(**changes: Any) -> Stranger:
    torch.manual_seed(0)
    return Stranger(StrangerConfig(**changes)).double().eval()


def test_a_stranger_that_uses_its_mask() -> None:
    model = stranger()
    documents = zoo.documents((7, 1, 3, 11))
    alone = torch.cat([model(d)[0] for d in documents], dim=1)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with tritonpack.patch(model):
        torch.testing.assert_close(model(torch.cat(documents, 1), position_ids=places)[0], alone)


def test_a_stranger_that_makes_its_own_mask_is_refused() -> None:
    model = stranger(uses_mask=False)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"Stranger isn't a model that tritonpack knows.*apart"):
        tritonpack.patch(model)
    assert not model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"


def test_a_stranger_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = Stranger(StrangerConfig())
    with pytest.raises(tritonpack.UnsupportedModelError, match="on the meta device; patch it once they are loaded"):
        tritonpack.patch(model)


def test_a_stranger_that_cannot_run_is_refused() -> None:
    model = stranger()
    model.qkv = nn.Linear(3, 3)
    with pytest.raises(tritonpack.UnsupportedModelError, match="can't be tried on a few tokens"):
        tritonpack.patch(model)


def test_a_known_model_without_weights_is_patched() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.tiny_config("llama"))
    tritonpack.patch(model).unpatch()


def test_trying_leaves_the_model_as_it_was() -> None:
    model = stranger().train()
    model.qkv.eval()
    before, random_state = [m.training for m in model.modules()], torch.get_rng_state()
    with tritonpack.patch(model):
        pass
    assert [m.training for m in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())


def test_no_token_that_the_configuration_names_is_tried() -> None:
    """An image's place, or a part's padding, isn't text."""
    model = stranger(media_token_ids=list(range(30)), text=StrangerConfig(image_token_index=63, pad_token_id=62))
    tried = set(torch.cat(probe._documents(model), dim=1).flatten().tolist())
    assert tried <= set(range(30, 62))


ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("config", [BertConfig(**ENCODER), ModernBertConfig(**ENCODER, local_attention=8)], ids=repr)
def test_encoders(config: PreTrainedConfig) -> None:
    """Both ways, with windows; ModernBERT isn't a causal type and is tried."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config).double().eval()
    with tritonpack.patch(model):
        check_isolation(model)


def test_an_encoder_that_counts_positions_its_own_way_is_refused() -> None:
    """ESM counts from the number of its padding token, which position ids from 0 don't."""
    model = AutoModelForMaskedLM.from_config(EsmConfig(**{**ENCODER, "pad_token_id": 1, "mask_token_id": 3})).eval()
    with pytest.raises(tritonpack.UnsupportedModelError, match="don't stay apart"):
        tritonpack.patch(model)


def test_encoder_with_decoder_is_refused() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16)
    with pytest.raises(tritonpack.UnsupportedModelError, match="documents would have to be told apart on both sides"):
        tritonpack.patch(BartForConditionalGeneration(config))


def test_cross_attention_is_refused() -> None:
    model = zoo.tiny_model("bart")
    with tritonpack.patch(model), pytest.raises(tritonpack.UnsupportedModelError, match="cross-attention"):
        model(torch.ones(1, 3, dtype=torch.long), encoder_hidden_states=torch.zeros(1, 2, 32))
