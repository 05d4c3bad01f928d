"""Models of speech and music: random draws, sounds with other sizes than the text, codebooks."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer import FastSpeech2ConformerModel

import tritonpack
from tests.patches import zoo
from tests.patches.sweep.build import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import assumed
from tests.patches.test_probe import Stranger, StrangerConfig
from tritonpack.patches.trial.packed_forms import FORMS

CASES = {case.name: case for case in cases()}
LAYOUTS: dict[str, Any] = {
    "FastSpeech2ConformerModel": "lengths",
    "FastSpeech2ConformerWithHifiGan": "lengths",
    "VitsModel": "lengths",
    "MusicgenMelodyForConditionalGeneration": "lengths",
    "SpeechT5ForTextToSpeech": "padded",
}
LENGTHS = (5, 5, 2, 5, 9)  # documents of one length become sounds of several lengths
NO_NOISE = {"noise_scale": 0.0, "noise_scale_duration": 0.0}


def tiny(name: str) -> Any:
    return build(CASES[name], dtype=torch.float32)


def patched(model: PreTrainedModel) -> Any:
    name = type(model).__name__
    with assumed(name, LAYOUTS[name]):
        return tritonpack.patch(model)


def rows_are(rows: Tensor, expected: list[Tensor]) -> None:
    """Compare each row with its document alone; zeros follow."""
    assert rows.shape[0] == len(expected)
    for row, one in zip(rows, expected, strict=True):
        own = tuple(slice(n) for n in one.shape)
        torch.testing.assert_close(row[own], one)
        rest = row.clone()
        rest[own] = 0
        assert not rest.any()


class TestSoundsOfOtherSizes:
    @pytest.mark.parametrize("name", ["FastSpeech2ConformerModel", "FastSpeech2ConformerWithHifiGan"])
    @pytest.mark.parametrize("form", ["position_ids", "segments_padded", "two_rows", "padded_end", "padded_right"])
    def test_a_row_for_each_document(self, name: str, form: str) -> None:
        model, documents = tiny(name), zoo.documents(LENGTHS)
        alone = [model(document) for document in documents]
        batch = FORMS[form](documents)
        with patched(model):
            got = model(batch.ids, **batch.arguments)
        assert len({one.spectrogram.shape[1] for one in alone[:2]}) == 2  # the documents have one length
        for key in {"spectrogram", "waveform"} & {*got}:
            rows_are(got[key], [one[key][0] for one in alone])
        assert got.spectrogram.shape[1] == max(one.spectrogram.shape[1] for one in alone)
        durations = [one.duration_outputs[0] for one in alone]
        torch.testing.assert_close(batch.gather(got.duration_outputs), torch.cat(durations))

    def test_sounds_with_as_many_frames_as_tokens(self) -> None:
        """An output with as many frames as tokens is a sound all the same."""
        model, documents = tiny("FastSpeech2ConformerModel"), zoo.documents((3, 4))
        model.duration_predictor.linear.weight.data.zero_()
        model.config.speaking_speed = 1.0
        model.duration_predictor.linear.bias.data.fill_(0.6931472)  # one frame for each token
        batch = FORMS["position_ids"](documents)
        with patched(model):
            got = model(batch.ids, **batch.arguments, output_hidden_states=True)
        rows_are(got.spectrogram, [model(document).spectrogram[0] for document in documents])
        assert got.spectrogram.shape[:2] == (2, 4)
        assert got.decoder_hidden_states[0].shape[:2] == (2, 4)
        assert got.encoder_hidden_states[0].shape[:2] == (1, 7)

    @pytest.mark.heavy
    def test_packed_equals_alone_without_noise(self) -> None:
        model, documents = tiny("VitsModel"), zoo.documents(LENGTHS)
        for name, value in NO_NOISE.items():
            setattr(model, name, value)
        alone = [model(document) for document in documents]
        batch = FORMS["segments_padded"](documents)
        with patched(model):
            got = model(batch.ids, **batch.arguments)
            named = model(batch.ids, **batch.arguments, return_dict=False)
        rows_are(got.waveform, [one.waveform[0] for one in alone])
        rows_are(got.spectrogram, [one.spectrogram[0] for one in alone])
        assert got.sequence_lengths.tolist() == [one.waveform.shape[1] for one in alone]
        assert torch.equal(named[0], got.waveform)

    def test_speakers_of_documents_and_of_rows(self) -> None:
        torch.manual_seed(0)
        config = zoo.tiny_config("fastspeech2_conformer", num_speakers=4)
        model = FastSpeech2ConformerModel(config).eval()
        documents, speakers = zoo.documents((3, 4, 6)), torch.tensor([[0], [2], [3]])
        batch = FORMS["two_rows"](documents)
        alone = [model(d, speaker_ids=s[None]).spectrogram[0] for d, s in zip(documents, speakers, strict=True)]
        shared = [
            model(d, speaker_ids=s[None]).spectrogram[0] for d, s in zip(documents, speakers[[0, 0, 1]], strict=True)
        ]
        with patched(model):
            rows_are(model(batch.ids, **batch.arguments, speaker_ids=speakers).spectrogram, alone)
            rows_are(model(batch.ids, **batch.arguments, speaker_ids=speakers[:2]).spectrogram, shared)
            with pytest.raises(ValueError, match=r"speaker_ids has shape \(4, 1\).*3 documents in 2 rows"):
                model(batch.ids, **batch.arguments, speaker_ids=torch.zeros(4, 1, dtype=torch.long))

    def test_losses_that_cannot_be_put_together(self) -> None:
        model, batch = tiny("FastSpeech2ConformerModel"), FORMS["position_ids"](zoo.documents((3, 4)))
        more = {"pitch_labels": torch.ones(1, 7, 1), "energy_labels": torch.ones(1, 7, 1)}
        more |= {"duration_labels": torch.ones(1, 7, dtype=torch.long), "spectrogram_labels": torch.ones(2, 4, 8)}
        with (
            patched(model.train()),
            pytest.raises(ValueError, match="each document in a call of its own, so its loss of"),
        ):
            model(batch.ids, **batch.arguments, **more)


class TestSpeechT5:
    """Dropout before its decoder is on in evaluation mode, too, with one mask for all rows of a batch."""

    @pytest.mark.parametrize("frames", [6, 22])
    def test_documents_equal_alone_under_the_same_random_state(self, frames: int) -> None:
        """Frames of each document; in one case as many as the row has tokens."""
        model, documents = tiny("SpeechT5ForTextToSpeech"), zoo.documents((7, 1, 3, 11))
        sounds = torch.randn(4, frames, 8)
        batch = FORMS["position_ids"](documents)

        def call(*args: Any, **more: Any) -> Any:
            torch.manual_seed(3)
            return model(*args, **more)

        alone = [
            call(d, decoder_input_values=sound[None]).spectrogram for d, sound in zip(documents, sounds, strict=True)
        ]
        with patched(model):
            got = call(batch.ids, **batch.arguments, decoder_input_values=sounds).spectrogram
            again = call(batch.ids, **batch.arguments, decoder_input_values=sounds[:1]).spectrogram
        torch.testing.assert_close(got, torch.cat(alone))
        assert again.shape == got.shape

    def test_masks_of_frames(self) -> None:
        """Frames can't be packed. A mask with a row for each document tells their padding."""
        model, documents = tiny("SpeechT5ForTextToSpeech"), zoo.documents((4, 2))
        sounds, mask = torch.randn(2, 6, 8), torch.tensor([[1] * 6, [1] * 3 + [0] * 3])
        batch = FORMS["position_ids"](documents)
        given = {**batch.arguments, "decoder_input_values": sounds}
        torch.manual_seed(3)
        expected = model(
            FORMS["padded_right"](documents).ids, attention_mask=torch.tensor([[1] * 4, [1, 1, 0, 0]]),
            decoder_input_values=sounds, decoder_attention_mask=mask,
        ).spectrogram  # fmt: skip
        with patched(model):
            torch.manual_seed(3)
            torch.testing.assert_close(model(batch.ids, **given, decoder_attention_mask=mask).spectrogram, expected)
            with pytest.raises(ValueError, match=r"decoder_attention_mask numbers documents up to 2.*Pass 0 and 1"):
                model(batch.ids, **given, decoder_attention_mask=mask * 2)
            with pytest.raises(ValueError, match=r"decoder_attention_mask has shape \(3, 6\)"):
                model(batch.ids, **given, decoder_attention_mask=torch.ones(3, 6, dtype=torch.long))


class TestCodebooks:
    def test_states_before_the_decoder(self) -> None:
        """Musicgen Melody puts an encoder's states before its decoder's tokens."""
        model = tiny("MusicgenMelodyForConditionalGeneration")
        sources, targets = zoo.documents((4, 4, 2)), zoo.documents((3, 5, 3), seed=2)
        source, target = (FORMS["segments_alone"](documents) for documents in (sources, targets))
        mask = {"decoder_attention_mask": target.arguments["attention_mask"]}
        books = [ids.repeat_interleave(2, dim=0) for ids in (*targets, target.ids)]
        alone = [model(d, decoder_input_ids=ids) for d, ids in zip(sources, books[:-1], strict=True)]
        with patched(model):
            got = model(source.ids, **source.arguments, **mask, decoder_input_ids=books[-1])
            with pytest.raises(ValueError, match="its loss of labels can't be combined"):
                model(source.ids, **source.arguments, **mask, labels=books[-1].T[None])
        rows_are(got.logits, [row for one in alone for row in one.logits])
        rows_are(got.encoder_hidden_states, [one.encoder_hidden_states[0] for one in alone])

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
        with assumed("MusicgenForConditionalGeneration", "packed"), tritonpack.patch(model):
            got = model(source.ids, decoder_input_ids=ids.repeat(2, 1), **told).logits
        torch.testing.assert_close(got[:, :-3], torch.cat(alone, dim=1))


class TestTrials:
    """Unknown models that draw random numbers, or whose sounds have other sizes than the text."""

    @pytest.mark.parametrize("uses_mask", [True, False])
    def test_noise(self, uses_mask: bool, trials: list[Any], packed_alone: None) -> None:
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

    @pytest.mark.slow
    def test_frames_that_depend_on_tokens(self, trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        class Odd(FastSpeech2ConformerModel):
            pass

        model = Odd(zoo.tiny_config("fastspeech2_conformer")).eval()
        with tritonpack.patch(model) as handle:
            assert handle.report.attention == "lengths"
        monkeypatch.setattr("tritonpack.patches.unpacking.always_unpacked.needs_calls_alone", lambda _: False)
        monkeypatch.setattr("tritonpack.patches.probe._verdicts", {})
        with pytest.raises(tritonpack.UnsupportedModelError, match="don't stay apart"):  # two documents have one length
            tritonpack.patch(model)
