"""Models of text and an image that run with one document in each row: outputs of images, and labels."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonpack
from tests.patches.sweep import build
from tests.patches.sweep.classes import cases
from tests.patches.sweep.judging import Trial, actual_layout, assumed
from tests.patches.zoo import documents
from tritonpack.patches.trial.packed_forms import FORMS, lay_out
from tritonpack.patches.trial.undisturbed import quiet

LENGTHS = (7, 1, 3, 11)
PATCHES = 5  # of the tiny ViLT's image, and one token for the whole image
CLASSES = ("ViltModel", "ViltForQuestionAnswering", "BlipForQuestionAnswering")


def built(name: str) -> Any:
    with quiet():
        return build.build(next(case for case in cases() if case.name == name))


@contextlib.contextmanager
def patched(model: Any) -> Iterator[None]:
    with assumed(type(model).__name__, "lengths"), tritonpack.patch(model):
        yield


def image(model: Any, count: int = 1) -> Tensor:
    size = getattr(model.config, "vision_config", model.config).image_size
    return torch.randn(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.heavy
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.slow
def test_the_sweep_finds_the_class_exact(name: str) -> None:
    with quiet():
        row = Trial(next(case for case in cases() if case.name == name)).run("patch")
    assert (row.verdict, row.reason, row.layout) == ("exact", "", "lengths")
    assert ("loss_position_ids" in row.forms) == (name != "ViltModel")  # ViltModel takes no labels


@pytest.mark.heavy
def test_a_class_that_gives_values_of_images_alone_is_judged_by_its_loss() -> None:
    case = next(case for case in cases() if case.name == "BlipForQuestionAnswering")

    def shifted(model: Any) -> contextlib.AbstractContextManager[Any]:
        model.text_decoder.cls.register_forward_hook(lambda module, args, output: output * 1.001)
        return tritonpack.patch(model)

    with quiet():
        trial = Trial(case, ("position_ids", "hidden_states", "loss_position_ids", "float32"))
        with assumed(case.name, "lengths"):
            right = trial._run_in("lengths", "patch", tritonpack.patch)
            wrong = trial._run_in("lengths", "patch", shifted)
    assert right.forms == dict.fromkeys(("position_ids", "loss_position_ids", "float32"), "exact")
    assert wrong.forms == dict.fromkeys(("position_ids", "loss_position_ids", "float32"), "inexact")


class TestImageAfterText:
    """ViLT's states belong to the text, and then to the image, whose patches come in random order."""

    @pytest.mark.parametrize("a_row_each", [False, True])
    def test_states_of_a_document_come_first_in_its_row(self, a_row_each: bool) -> None:
        model = built("ViltModel")
        ids = documents(LENGTHS)
        batch = lay_out([[i] for i in range(len(ids))], ids, more=2) if a_row_each else FORMS["position_ids"](ids)
        with torch.no_grad():
            alone = [model(input_ids=one, pixel_values=image(model)).last_hidden_state[0] for one in ids]
            with patched(model):
                got = model(
                    input_ids=batch.ids,
                    pixel_values=image(model).expand(len(batch.ids), -1, -1, -1),
                    output_hidden_states=True,
                    **batch.arguments,
                )
        states = got.last_hidden_state
        assert states.shape == (len(ids), max(LENGTHS) + PATCHES, model.config.hidden_size)
        for one, expected, n in zip(states, alone, LENGTHS, strict=True):
            torch.testing.assert_close(one[:n], expected[:n], rtol=0, atol=1e-9)
            torch.testing.assert_close(one[n : n + PATCHES].sum(0), expected[n:].sum(0), rtol=0, atol=1e-9)
            assert not one[n + PATCHES :].any()
        assert [x.shape for x in got.hidden_states] == [states.shape] * 3


class TestAnswers:
    def test_labels_of_blip_are_the_tokens_of_its_decoder(self) -> None:
        """Users train it without decoder_input_ids. Answers and questions have different lengths."""
        model = built("BlipForQuestionAnswering")
        questions, answers = documents(LENGTHS), documents((3, 4, 2, 6))
        with torch.no_grad():
            losses = [
                model(input_ids=q, pixel_values=image(model), labels=a).loss
                for q, a in zip(questions, answers, strict=True)
            ]
            weights = torch.tensor([a.numel() - 1 for a in answers], dtype=torch.float64)
            expected = (torch.stack(losses) * weights).sum() / weights.sum()
            batch, answer = FORMS["position_ids"](questions), FORMS["segments_padded"](answers)
            labels = answer.ids.masked_fill(answer.arguments["attention_mask"] == 0, -100)
            with patched(model):
                assert actual_layout(model) == "lengths"
                given = {
                    "input_ids": batch.ids,
                    "pixel_values": image(model),
                    "labels": labels,
                    "decoder_attention_mask": answer.arguments["attention_mask"],
                }
                got = model(**given, **batch.arguments).loss
                with pytest.raises(ValueError, match=r"rows hold \[1\] documents in the encoder and \[4\] in"):
                    model(**given)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)

    def test_decoder_without_documents_is_refused(self) -> None:
        model = built("BlipForQuestionAnswering")
        batch = FORMS["position_ids"](documents(LENGTHS))
        with patched(model), pytest.raises(ValueError, match="Tell documents apart on both sides"):
            model(input_ids=batch.ids, pixel_values=image(model), labels=batch.ids[:, :9], **batch.arguments)

    def test_states_of_an_image_stay_whole_where_answers_are_as_long(self) -> None:
        """BLIP's last_hidden_state belongs to its image, which has as many patches here as each answer has tokens."""
        model = built("BlipForQuestionAnswering")
        config = model.config.vision_config
        patches = (config.image_size // config.patch_size) ** 2 + 1
        questions, answers = documents((3, 4)), documents((patches, patches))
        with torch.no_grad():
            alone = [
                model(input_ids=q, pixel_values=image(model), decoder_input_ids=a, output_hidden_states=True)
                for q, a in zip(questions, answers, strict=True)
            ]
            batch, answer = FORMS["position_ids"](questions), FORMS["position_ids"](answers)
            with patched(model):
                got = model(
                    input_ids=batch.ids,
                    pixel_values=image(model),
                    decoder_input_ids=answer.ids,
                    decoder_position_ids=answer.arguments["position_ids"],
                    output_hidden_states=True,
                    **batch.arguments,
                )
        torch.testing.assert_close(got.last_hidden_state, torch.cat([x.last_hidden_state for x in alone]))
        torch.testing.assert_close(got.hidden_states[1], torch.cat([x.hidden_states[1] for x in alone]))
