"""Arguments whose names resemble those that tell documents apart are refused, and no others."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils.generic import TransformersKwargs

import tritonpack
from tests.patches import zoo
from tests.patches.models import tiny_model
from tests.patches.test_patching import LENGTHS, documents, offsets, positions, segments
from tritonpack.patches.parse_inputs import TELLING, meant_by

MEANT = {
    "cu_seq_lens_q": (
        "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seqlen", "cu_seq_len_q", "cumulative_seqlens",
        "max_seqlen", "max_seqlen_q", "max_seqlens", "seq_lens", "seqlens", "seq_lengths", "sequence_lengths",
        "packed_seq_lens", "document_lengths", "doc_lens", "lengths", "doc_offsets", "Cu_Seqlens",
        "packed_seq_params", "cumulative_lengths", "input_lengths", "doc_boundaries", "boundaries",
        "sequence_boundaries", "num_docs", "num_sequences",
    ),
    "seq_idx": (
        "segment_ids", "segments", "sequence_id", "sequence_ids", "seq_id", "seq_ids", "seqidx", "seq_indices",
        "doc_ids", "doc_id", "document_ids", "document_id", "documents", "document_index",
        "sample_ids", "batch_ids", "pack_ids", "example_ids", "group_ids", "episode_ids", "token_doc_ids",
    ),
    "position_ids": (
        "positions_ids", "position_id", "positions", "position", "pos_ids", "position_idx", "postion_ids",
        "positionids", "segment_positions", "document_positions",
    ),
    "attention_mask": (
        "attn_mask", "attention_masks", "atention_mask", "padding_mask", "document_mask", "block_mask", "packing_mask",
        "packed_mask", "eod_mask",
    ),
}  # fmt: skip

# Arguments in the signatures of models of transformers that do tell documents apart.
THEIR_OWN = {"lengths", "padding_mask", "sequence_id"}

# Other arguments that trainers and collators of transformers, TRL and accelerate put into a batch or a call.
TRAINERS = (
    "input_ids", "labels", "shift_labels", "num_items_in_batch", "return_loss", "output_hidden_states", "use_cache",
    "logits_to_keep", "token_type_ids", "completion_mask", "assistant_masks", "max_length_q", "max_length_k", "length",
    "special_tokens_mask", "cache_position", "past_key_values", "return_dict", "output_attentions", "inputs_embeds",
    "output_router_logits", "mm_token_type_ids", "image_grid_thw", "pixel_values", "decoder_input_ids", "max_length",
    "decoder_attention_mask", "encoder_attention_mask", "global_attention_mask", "pixel_attention_mask",
    "decoder_position_ids", "position_bias", "attention_bias", "chosen_input_ids", "advantages", "is_causal",
)  # fmt: skip


@pytest.mark.parametrize(("meant", "name"), [(meant, name) for meant, names in MEANT.items() for name in names])
def test_the_argument_that_a_name_is_meant_for(meant: str, name: str) -> None:
    assert meant_by(name) == meant


@pytest.mark.slow
def test_known_arguments_are_accepted() -> None:
    """All arguments of all models of transformers, its common keywords, and arguments of trainers."""
    names = {*TRAINERS, *TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    count = 0
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for model in ast.parse(path.read_text()).body:
            if isinstance(model, ast.ClassDef) and any("PreTrained" in ast.unparse(base) for base in model.bases):
                for method in model.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        names |= {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}
                        count += 1
    assert count > 1000
    assert {name for name in names if meant_by(name)} == THEIR_OWN
    assert not any(meant_by(name) for name in TELLING)


VALUES: dict[str, Any] = {
    "cu_seqlens": offsets(),
    "cu_seqlens_q": offsets(),
    "segment_ids": segments(),
    "sequence_id": segments(),
    "positions_ids": positions(),
    "seq_lens": list(LENGTHS),
    "cu_seq_lens_k": offsets(),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("inner", [False, True], ids=["head", "model"])
def test_a_near_miss_is_refused(name: str, inner: bool) -> None:
    model, ids = tiny_model("llama"), torch.cat(documents(), 1)
    with tritonpack.patch(model):
        called = model.model if inner else model
        with pytest.raises(ValueError, match=f"was called with '{name}'.* Pass "):
            called(ids, **{name: VALUES[name]})
        with pytest.raises(ValueError, match=f"was called with '{name}'"):
            called.forward(ids, **{name: VALUES[name]})
        assert called(ids, **{name: None})[0].isfinite().all()
    called(ids, **{name: VALUES[name]})  # stock transformers ignores it


class Numbered(LlamaForCausalLM):
    """A model whose own argument resembles one of ours."""

    def forward(self, input_ids: Any, segment_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = attention_mask if segment_ids is None else segment_ids
        return super().forward(input_ids, attention_mask=mask, **kwargs)


@pytest.mark.usefixtures("untried")
def test_arguments_in_a_models_signature_are_accepted() -> None:
    model, ids = Numbered(zoo.tiny_config("llama")).double().eval(), torch.cat(documents(), 1)
    expected = torch.cat([model(piece).logits for piece in documents()], dim=1)
    with tritonpack.patch(model):
        assert "segment_ids" in inspect.signature(model.forward).parameters
        got = model(ids, segment_ids=segments()).logits
    assert float((got - expected).abs().max()) < 1e-6
