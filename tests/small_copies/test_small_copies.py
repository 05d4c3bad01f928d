"""shrink makes a small configuration with the same switches of every default configuration, and its model runs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from tests.patches import zoo
from tests.small_copies.packed_forms import whole
from tests.small_copies.shrink import shrink
from tests.small_copies.small_copy import NotSmallError, small_copy
from tests.small_copies.subject import subject_of
from tritonpack.patches.configurations import special_tokens

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
INDEXER = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}  # fmt: skip

# Fields that default configurations lack for transformers' own models to be built, or to run.
COMPLETED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},  # its cache can't be without attention
    "blt": {"num_hidden_layers": 24},  # no field of it, yet what its cache asks for
    "cohere_compass_text": {
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 10,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}, FULL: None,
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5, "clip_qkv": 8.0}, "n_heads": 48, "d_model": 6144},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ([LINEAR] * 7 + [FULL]) * 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", FULL, "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip

# Model types whose default configuration can't be built in any size, or doesn't run on tokens, and the message.
UNBUILT = {
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "gemma4_unified_assistant": "inputs_embeds and shared_kv_states cannot be None",
}


def default(name: str, **values: Any) -> Any:
    return CONFIG_MAPPING[name](**{**copy.deepcopy(COMPLETED.get(name, {})), **values})


def run(model: PreTrainedModel, lengths: tuple[int, ...] = (20,)) -> Tensor:
    subject = subject_of(model)
    with torch.no_grad():
        outputs = [subject.tensors(whole(document)) for document in subject.draw(lengths, 1)]
    return torch.cat([next(iter(one.values()))[0] for one in outputs])


@pytest.mark.parametrize("name", zoo.MODEL_TYPES)
@pytest.mark.fast(
    "bert",
    "falcon_h1",
    "gemma3n",
    "gpt_oss",
    "llama4_text",
    "mamba2",
    "qwen3_next",
    "roformer",
    "t5",
    "whisper",
)
def test_a_small_copy_of_every_default_configuration_runs(name: str) -> None:
    if name in UNBUILT:
        with pytest.raises(Exception, match=UNBUILT[name]):
            run(small_copy(default(name)).model)
        return
    built = small_copy(default(name))
    assert sum(p.numel() for p in built.model.parameters()) < 2_500_000
    assert run(built.model).isfinite().all()
    assert bool(built.notes) == (name == "gemma3n")  # whose vision tower takes a package of its own


def test_most_default_configurations_are_complete() -> None:
    assert len(COMPLETED) + len(UNBUILT) <= 18
    assert {*COMPLETED, *UNBUILT} <= set(zoo.MODEL_TYPES)


# Fields that must affect short documents, each with a larger value that doesn't.
FELT = [
    ("mistral", "sliding_window", 64), ("gemma2", "sliding_window", 64), ("gpt_oss", "sliding_window", 64),
    ("llama4_text", "attention_chunk_size", 64), ("llama4_text", "floor_scale", 64), ("gpt_neo", "window_size", 64),
    ("deepseek_v32", "index_topk", 64), ("recurrent_gemma", "attention_window_size", 64),
    ("modernbert-decoder", "sliding_window", 64), ("inkling2_text", "rel_extent", 64),
    ("qwen4_exp_text", "indexer_budget", 64),
]  # fmt: skip


@pytest.mark.fast("mistral-sliding_window-64", "llama4_text-floor_scale-64", "modernbert-decoder-sliding_window-64")
@pytest.mark.parametrize(("name", "field", "wider"), FELT)
def test_windows_affect_short_documents(name: str, field: str, wider: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def widened(config: Any) -> Any:
        return type(config).from_dict({**shrink(config).to_dict(), field: wider})

    narrow = run(small_copy(default(name)).model)
    monkeypatch.setattr("tests.small_copies.small_copy.shrink", widened)
    assert (run(small_copy(default(name)).model) - narrow).abs().max() > 1e-3 * narrow.abs().max()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_changes_of_rotary_embeddings_affect_short_documents(kind: str) -> None:
    """In a call of two documents, the embeddings depend on the longer one; alone, on the document itself."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 64, "long_factor": [1.0 + i for i in range(64)]}
        rope |= {**factors, "original_max_position_embeddings": 4096}
    model = small_copy(default("llama", rope_parameters=rope)).model
    short, long = subject_of(model).draw((5, 12), 1)
    with torch.no_grad():
        alone = model(input_ids=short).logits
        beside = model(
            input_ids=torch.cat([short, long], dim=1),
            position_ids=torch.cat([torch.arange(5), torch.arange(12)])[None],
            use_cache=False,
        ).logits
    assert (alone - beside[:, :5]).abs().max() > 1e-3 * alone.abs().max()


def test_kinds_of_layers_stay_in_order() -> None:
    assert shrink(default("gemma3_text")).layer_types == [SLIDING, FULL]
    assert shrink(default("qwen3_next")).layer_types == [LINEAR, FULL]
    assert shrink(default("zamba")).layers_block_type == [LINEAR, "hybrid", "hybrid"]
    assert shrink(default("nemotron_h")).layers_block_type == [LINEAR, "moe", FULL, "mlp"]
    assert shrink(default("jamba")).layers_block_type == ["mamba", "attention"]
    assert shrink(default("bamba")).layers_block_type == [LINEAR, FULL]
    assert shrink(default("recurrent_gemma")).num_hidden_layers == 3
    assert shrink(default("gpt_neo")).attention_layers == ["global", "local"]
    assert shrink(default("dory")).layer_types == [SLIDING, FULL] * 3
    deepseek = shrink(default("deepseek_v3"))
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)
    shared = shrink(default("gemma3n_text"))
    assert shared.num_kv_shared_layers == 2
    assert shared.layer_types[-2:] == shared.layer_types[-4:-2] == [SLIDING, FULL]


def test_layers_that_run_again_and_again_stay() -> None:
    dory = shrink(default("dory"))
    assert (dory.n_input_layers, dory.n_recurrent_layers, dory.n_output_layers) == (2, 2, 2)
    inkling = shrink(default("inkling2_loop_text"))
    assert 0 < inkling.loop_layer_index_start < inkling.loop_layer_index_end < inkling.num_hidden_layers
    assert inkling.loop_num_passes > 1


def test_options_of_attention_are_not_shrunk() -> None:
    config = default("gemma2", attention_bias=True, query_pre_attn_scalar=144)
    small = shrink(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "attention_bias", "query_pre_attn_scalar"):
        assert getattr(small, name) == getattr(config, name)
    grouped = shrink(default("llama", hidden_size=5120, num_attention_heads=40, num_key_value_heads=8))
    assert (grouped.num_attention_heads, grouped.num_key_value_heads) == (10, 2)
    assert grouped.hidden_size == 10 * grouped.head_dim
    latent = shrink(default("glm4_moe_lite"))
    assert latent.qk_head_dim == latent.qk_nope_head_dim + latent.qk_rope_head_dim
    assert latent.v_head_dim > latent.qk_nope_head_dim > latent.qk_rope_head_dim
    gemma4 = shrink(default("gemma4_text"))
    assert [layer.head_dim for layer in gemma4.per_layer_config] == [16, 32]
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 32768}
    yarn = shrink(default("qwen2", rope_parameters=scaled, max_position_embeddings=131072))
    assert yarn.rope_parameters == {**scaled, "original_max_position_embeddings": 8}
    assert yarn.max_position_embeddings == 32


def test_sections_of_multimodal_rotary_embeddings() -> None:
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [22, 22, 20]}
    small = shrink(default("ernie4_5_vl_moe", text_config={"rope_parameters": sections, "head_dim": 128})).text_config
    assert small.rope_parameters["mrope_section"] == [1, 1, 2]
    unsaid = shrink(default("qwen2_vl")).text_config
    assert unsaid.rope_parameters["mrope_section"] == [2, 1, 1]
    assert sum(unsaid.rope_parameters["mrope_section"]) == unsaid.hidden_size // unsaid.num_attention_heads // 2


def test_the_given_configuration_is_not_changed() -> None:
    config = default("gemma4")
    before = copy.deepcopy(config.to_dict())
    shrink(config)
    assert config.to_dict() == before


def test_no_size_grows() -> None:
    tiny = default(
        "llama", vocab_size=60, hidden_size=24, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    assert shrink(tiny).to_dict() == tiny.to_dict()


def test_special_tokens_stay_apart() -> None:
    config = default("gemma3")
    small = shrink(config)
    assert len(special_tokens(small)) == len(special_tokens(config))
    assert max(special_tokens(small)) < small.text_config.vocab_size // 2
    model = small_copy(config).model
    drawn = torch.cat(subject_of(model).draw((500,), 0), dim=1)
    assert not special_tokens(model.config) & set(drawn.flatten().tolist())


class OldConfig(PreTrainedConfig):
    """A configuration with a constructor of its own, as in remote code."""

    model_type = "old"

    def __init__(
        self, width: int = 4096, n_layer: int = 30, n_head: int = 32, kinds: Any = None, **kwargs: Any
    ) -> None:
        self.width, self.n_layer, self.n_head = width, n_layer, n_head
        self.kinds = kinds or ["a", "b"] * (n_layer // 2)
        super().__init__(**kwargs)


def test_configurations_with_a_constructor_of_their_own() -> None:
    small = shrink(OldConfig(bos_token_id=1, window_size=512))
    assert isinstance(small, OldConfig)
    assert (small.n_layer, small.n_head, small.kinds, small.window_size) == (2, 4, ["a", "b"], 4)


def test_the_error_says_why_no_small_copy_can_be_built() -> None:
    with pytest.raises(NotSmallError, match="TypeError: unsupported operand"):
        small_copy(CONFIG_MAPPING["hunyuan_v1_dense"]())
