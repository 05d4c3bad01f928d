"""LayoutLMv2: text and the patches of an image, whose features come from a replacement of detectron2."""

import sys

import pytest
import transformers
from transformers.models.layoutlmv2 import modeling_layoutlmv2

from tests.patches.sweep import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.running import judge_case
from tritonpack.patches.measuring import quiet

CASES = {case.name: case for case in cases() if case.model_type == "layoutlmv2"}
PATCHES = 4  # of an image, after the tokens of its document
LENGTHS = (7, 3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.fast("LayoutLMv2ForTokenClassification")
def test_is_refused(name: str) -> None:
    """The patches of an image follow the tokens of a row, and belong to none of its documents."""
    with quiet():
        (row,) = judge_case(CASES[name], ("patch",), ["position_ids", "segments_alone"])
    assert row.verdict == "refused"
    assert row.reason.startswith("when patched: ")


@pytest.mark.skipif(transformers.utils.is_detectron2_available(), reason="detectron2 itself is installed")
def test_the_stand_in_is_there_only_while_a_model_is_built() -> None:
    before = set(vars(modeling_layoutlmv2))
    config = build.build(CASES["LayoutLMv2Model"]).config
    assert set(vars(modeling_layoutlmv2)) == before
    assert "detectron2" not in sys.modules
    with pytest.raises(ImportError, match="requires the detectron2 library"):
        transformers.LayoutLMv2Model(config)
