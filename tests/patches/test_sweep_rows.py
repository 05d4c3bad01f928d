"""Classes that a row of the sweep's tables lets build and run: packed exactly, with what the row gives them."""

import pytest

from tests.patches.sweep import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import judge_case

CLASSES = (
    "Qwen2_5OmniThinkerForConditionalGeneration/qwen2_5_omni_thinker",
    "Qwen3OmniMoeThinkerForConditionalGeneration/qwen3_omni_moe_thinker",
)
CASES = {case.key: case for case in cases()}


@pytest.mark.parametrize("key", CLASSES)
def test_is_packed_exactly(key: str) -> None:
    with build.quiet():
        (row,) = judge_case(CASES[key], ("patch",), ("position_ids", "segments_alone", "two_rows_padded"))
    assert (row.verdict, row.reason) == ("exact", "")
