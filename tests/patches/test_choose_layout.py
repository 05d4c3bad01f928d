"""Warnings about the layout that a model gets."""

import warnings
from typing import Any

import pytest
import torch
import transformers

import tritonpack
from tests.patches import zoo
from tritonpack import notices
from tritonpack.patches import exact_classes

BATCH = {"input_ids": torch.arange(9, 15)[None], "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}


def test_a_warning_when_a_trial_finds_packed_rows_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what the trial found, and a version of transformers that packs the class, if the table has one."""

    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        __module__ = transformers.LlamaForCausalLM.__module__

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(input_ids, **kwargs)
            output.logits = output.logits + 0.1 * output.logits.cumsum(1)
            return output

    monkeypatch.setattr(notices, "_said", {})
    monkeypatch.setattr(exact_classes, "installed", lambda: "6.1")
    known = {"packed": {"LlamaForCausalLM": {"5.6", "5.17"}}, "padded": {}, "lengths": {}}
    monkeypatch.setattr(exact_classes, "versions", lambda: known)
    model = LlamaForCausalLM(zoo.tiny_config("llama"))
    found = r"\(in a trial with transformers .*position_ids: logits: .*; with transformers 5.17 packed rows are exact\)"
    with pytest.warns(tritonpack.PackingWarning, match=f"LlamaForCausalLM can't keep .* {found}, so each gets a row"):
        assert tritonpack.patch(model).report.attention == "padded"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**BATCH)


def test_a_warning_when_another_transformers_packs_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CTRL, which makes its mask itself in old versions."""
    monkeypatch.setattr(notices, "_said", {})
    known = {"packed": {"CTRLLMHeadModel": {"5.99"}}, "padded": {"CTRLLMHeadModel": {exact_classes.installed()}}}
    monkeypatch.setattr(exact_classes, "versions", lambda: {**known, "lengths": {}})
    model = transformers.CTRLLMHeadModel(zoo.tiny_config("ctrl"))
    with pytest.warns(tritonpack.PackingWarning, match=r"apart \(with transformers 5.99 packed rows are exact\), so"):
        assert tritonpack.patch(model).report.attention == "padded"


def test_no_version_is_named_if_layers_of_a_model_are_why_it_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doge is packed, but for its experts."""
    monkeypatch.setattr(notices, "_said", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tritonpack.patch(zoo.tiny_model("doge-experts")).report.attention == "lengths"


def test_a_trial_leaves_the_warning_to_the_first_packed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(transformers.CpmAntForCausalLM):  # in packed rows it is refused before it is tried
        pass

    monkeypatch.setattr(notices, "_said", {})
    model = Own(zoo.tiny_config("cpmant"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tritonpack.patch(model).report.attention == "lengths"
    with pytest.warns(tritonpack.PackingWarning, match="Own can't keep several documents in a row apart, so"):
        model(**BATCH)
