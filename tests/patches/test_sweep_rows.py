"""Classes that a row of the tables lets build and run: packed exactly with what it gives them, or refused for what it
says."""

from typing import Any

import pytest
import torch

import tritonpack
from tests.patches.sweep import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.running import judge_case
from tritonpack.parallel.validate import require_shardable
from tritonpack.patches.measuring import quiet

EXACT = (
    "FlaubertModel/flaubert",
    "IBertModel/ibert",
    "InklingModel/inkling_mm_model",
    "Kosmos2_5Model/kosmos-2.5",
    "LayoutLMModel/layoutlm",
    "LayoutLMv3Model/layoutlmv3",
    "LiltModel/lilt",
    "LukeModel/luke",
    "MPNetModel/mpnet",
    "MarkupLMModel/markuplm",
    "MobileBertModel/mobilebert",
    "MusicgenForConditionalGeneration/musicgen",
    "Nemotron3_5TranscribeModel/nemo_speechlm",
    "PerceptionLMModel/perception_lm",
    "Qwen2_5OmniThinkerForConditionalGeneration/qwen2_5_omni_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration/qwen3_omni_moe_thinker",
)

REFUSED = {
    "DiffusionGemmaModel/diffusion_gemma": "its canvas attends through a cache to the keys of whole rows",
    "VoxtralRealtimeModel/voxtral_realtime": "its encoder hears a row's sounds",
}
LONG = {"MusicgenForConditionalGeneration/musicgen"}
CASES = {case.key: case for case in cases()}


@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.slow) if key in LONG else key for key in EXACT])
@pytest.mark.fast("FlaubertModel/flaubert", "LayoutLMv3Model/layoutlmv3", "LukeModel/luke")
def test_is_packed_exactly(key: str) -> None:
    chosen = ("position_ids", "segments_alone", "two_rows_padded", "float32")
    with quiet():
        (row,) = judge_case(CASES[key], ("patch",), chosen)
    assert (row.verdict, row.reason) == ("exact", "")


@pytest.mark.slow
@pytest.mark.parametrize("key", REFUSED)
def test_is_refused_with_the_reason(key: str) -> None:
    with quiet():
        (row,) = judge_case(CASES[key], ("patch",), ("position_ids",), with_gradients=False)
    assert row.verdict == "refused"
    assert REFUSED[key] in row.reason


ENTITIES = {"entity_ids": torch.tensor([[3, 4]]), "entity_position_ids": torch.tensor([[[0, 1, -1], [5, 6, -1]]])}
BESIDE: dict[str, dict[str, Any]] = {
    "LukeModel/luke": ENTITIES,
    "LukeForMaskedLM/luke": ENTITIES,
    "LayoutLMv3Model/layoutlmv3": {"pixel_values": torch.ones(1, 3, 8, 8, dtype=torch.float64)},
}


@pytest.mark.parametrize("key", BESIDE)
def test_entities_and_images_appended_to_packed_rows_are_refused(key: str) -> None:
    """Entities and images are appended to the row, and belong to none of its documents."""
    model = build.build(CASES[key])
    ids, places = torch.arange(6, 18)[None], torch.tensor([[*range(5), *range(7)]])
    names = " and ".join(BESIDE[key])
    with tritonpack.patch(model), pytest.raises(ValueError, match=f"{names} to its tokens.*Leave {names} out") as info:
        model(input_ids=ids, position_ids=places, **BESIDE[key])
    assert "isn't patched" not in str(info.value)


@pytest.mark.parametrize("key", ["EsmModel/esm", "LayoutLMModel/layoutlm", "MobileBertModel/mobilebert"])
def test_what_reads_other_tokens_before_attention_is_not_shared_by_ranks(key: str) -> None:
    model = build.build(CASES[key])
    with (
        tritonpack.patch(model) as handle,
        pytest.raises(tritonpack.UnsupportedModelError, match="reads other tokens of a document"),
    ):
        require_shardable(model, handle.report)
