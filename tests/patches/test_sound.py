"""Models of speech and music: random draws and codebooks."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tritonpack
from tests.patches import zoo
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import assumed
from tests.patches.test_probe import Stranger, StrangerConfig
from tritonpack.patches.trial.packed_forms import FORMS

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


class TestTrials:
    """Unknown models that draw random numbers."""

    @pytest.mark.parametrize("uses_mask", [True, False])
    def test_noise(self, uses_mask: bool, trials: list[Any]) -> None:
        class Noisy(Stranger):
            def forward(self, input_ids: Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Tensor]:
                (hidden,) = super().forward(input_ids, attention_mask, **kwargs)
                return (hidden + torch.randn_like(hidden),)

        model = Noisy(StrangerConfig(uses_mask=uses_mask)).double().eval()
        if uses_mask:
            tritonpack.patch(model)
        else:
            with pytest.raises(tritonpack.UnsupportedModelError, match="don't stay apart"):
                tritonpack.patch(model)

    def test_noise_that_cannot_be_made_constant(self, trials: list[Any]) -> None:
        counts = iter(range(1000))

        class Counting(Stranger):
            def forward(self, input_ids: Tensor, attention_mask: Any = None, **kwargs: Any) -> tuple[Tensor]:
                return (super().forward(input_ids, attention_mask, **kwargs)[0] + next(counts),)

        with pytest.raises(
            tritonpack.UnsupportedModelError, match=r"two calls in evaluation mode .* give other outputs"
        ):
            tritonpack.patch(Counting(StrangerConfig()).double().eval())
