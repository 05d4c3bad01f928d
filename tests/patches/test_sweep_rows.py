"""Classes that a row of the tables lets build and run: packed exactly with what it gives them, or refused for what it
says."""

import pytest

from tests.patches.sweep import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import judge_case

EXACT = (
    "InklingModel/inkling_mm_model",
    "Nemotron3_5TranscribeModel/nemo_speechlm",
    "PerceptionLMModel/perception_lm",
    "Qwen2_5OmniThinkerForConditionalGeneration/qwen2_5_omni_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration/qwen3_omni_moe_thinker",
)
REFUSED = {
    "DiffusionGemmaModel/diffusion_gemma": "its canvas attends through a cache to the keys of whole rows",
    "VoxtralRealtimeModel/voxtral_realtime": "its encoder hears a row's sounds",
}
CASES = {case.key: case for case in cases()}


@pytest.mark.parametrize("key", EXACT)
def test_is_packed_exactly(key: str) -> None:
    with build.quiet():
        (row,) = judge_case(CASES[key], ("patch",), ("position_ids", "segments_alone", "two_rows_padded"))
    assert (row.verdict, row.reason) == ("exact", "")


@pytest.mark.parametrize("key", REFUSED)
def test_is_refused_with_the_reason(key: str) -> None:
    with build.quiet():
        (row,) = judge_case(CASES[key], ("patch",), ("position_ids",), with_gradients=False)
    assert row.verdict == "refused"
    assert REFUSED[key] in row.reason
