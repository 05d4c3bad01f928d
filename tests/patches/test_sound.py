"""Models of speech and music: random draws and codebooks."""

import torch
import transformers

import tritonpack
from tests.patches import zoo
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import assumed
from tests.small_copies.packed_forms import FORMS

CASES = {case.name: case for case in cases()}


class TestCodebooks:
    def test_padding_of_each_side(self) -> None:
        """Text and sound have different padding tokens."""
        config = zoo.tiny_config("musicgen")
        config.decoder.pad_token_id = 3
        torch.manual_seed(0)
        model = transformers.MusicgenForConditionalGeneration(config).double().eval()
        form = FORMS["padded_end"]
        source, target = form(zoo.documents((4, 2, 3))), form(zoo.documents((3, 5, 1), seed=2))
        ids = target.ids.clone()
        ids[:, -3:] = 3
        told = {**source.arguments, "decoder_position_ids": target.arguments["position_ids"]}
        pairs = zip(zoo.documents((4, 2, 3)), zoo.documents((3, 5, 1), seed=2), strict=True)
        alone = [model(a, decoder_input_ids=b.repeat(2, 1)).logits for a, b in pairs]
        with assumed("MusicgenForConditionalGeneration", shown=True), tritonpack.patch(model):
            got = model(source.ids, decoder_input_ids=ids.repeat(2, 1), **told).logits
        torch.testing.assert_close(got[:, :-3], torch.cat(alone, dim=1))
