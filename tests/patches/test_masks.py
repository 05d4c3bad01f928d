"""Masks that a model of remote code asks transformers for, and computes with by itself, for packed documents."""

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

import tritonpack
from tests.patches.calls import EXACT, FORMS, LENGTHS, documents, relative
from tests.patches.remote_code import FIRST_IMAGE, MASKS, USES, blocks, chunks, composed
from tritonpack import UnsupportedModelError


def with_images() -> list[Tensor]:
    """The image at the end of a document continues in the next one by its number alone."""
    pieces = [piece % FIRST_IMAGE for piece in documents()]
    pieces[0][0, 2:5], pieces[2][0, 1:], pieces[3][0, :2], pieces[3][0, 6:9] = 41, 42, 42, 43
    return pieces


TRIED = [(mask, "where") for mask in MASKS] + [("window", use) for use in USES if use != "ignored"]


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("mask", "use"), [*TRIED, ("images", "add")])
def test_packed_equals_alone(mask: str, use: str) -> None:
    model, pieces = composed(mask, use), with_images()
    expected = torch.cat([model(piece)[0] for piece in pieces], 1)[0]
    for form in ("position_ids", "segments_padded", "two_rows_padded"):
        batch = FORMS[form](pieces)
        with tritonpack.patch(model):
            got = batch.gather(model(batch.ids, **batch.arguments)[0])
        assert relative(expected, got) < EXACT, form


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("case", ["a window of another size", "images of two parts", "images in chunks"])
def test_masks_that_tritonpack_cannot_read_are_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, words = with_images(), {"w": "isn't the window", "i": "aren't one interval"}
    if case == "a window of another size":  # as a later transformers may pass it
        own = masking_utils.sliding_window_causal_mask_function
        monkeypatch.setattr(masking_utils, "sliding_window_causal_mask_function", lambda size: own(size + 1))
        model, words = composed("window or none"), "isn't the window"
    elif case == "images of two parts":
        pieces[3][0, 0] = 43
        model, words = composed("images"), "aren't one interval"
    else:
        monkeypatch.setitem(MASKS, "chunks", lambda ids, *given: chunks(*given, block_sequence_ids=blocks(ids)))
        model, words = composed("chunks"), "chunks, a window, or one of them"
    batch = FORMS["position_ids"](pieces)
    assert sum(LENGTHS) == batch.ids.shape[1]
    with tritonpack.patch(model), pytest.raises((ValueError, UnsupportedModelError), match=words):
        model(batch.ids, **batch.arguments)
