"""PEFT: adapters get the gradients of separate documents, whichever of the two comes first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import tritonpack
from tests.ecosystem.training import EXACT, apart, difference
from tests.patches import zoo
from tests.patches.calls import documents, state, told
from tests.patches.models import tiny_model
from tritonpack.patches.applied_patch import applied_to

peft = pytest.importorskip("peft")

FORMS = ("position_ids", "collator", "segment_mask", "seq_idx_alone")


def make(family: str) -> PreTrainedModel:
    return tiny_model(family) if family in ("llama", "mistral") else zoo.tiny_model(family, dtype=torch.float64)


def with_lora(model: PreTrainedModel) -> Any:
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).to(next(model.parameters()).dtype)


def gradients(logits: Tensor, model: nn.Module) -> list[Tensor]:
    """Logits of all documents, and the gradients of the adapters' weights under a loss that weighs every one."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), list(trained.values()))]


def alone(model: nn.Module) -> list[Tensor]:
    return gradients(torch.cat([model(input_ids=d).logits for d in documents()], 1), model)


def packed(model: nn.Module, form: str = "position_ids", **others: Any) -> list[Tensor]:
    return gradients(model(input_ids=torch.cat(documents(), 1), **told(form), **others).logits, model)


@pytest.mark.parametrize("first", ["patch", "peft"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_next"])
@pytest.mark.fast("mistral-patch", "gpt_oss-peft")
def test_adapters_learn_from_separate_documents(family: str, first: str) -> None:
    """Also if the wrapped model's forward is called, past its hooks, as some versions of PEFT do."""
    model: Any = make(family)
    expected, ids = alone(with_lora(make(family))), torch.cat(documents(), 1)
    if first == "patch":
        tritonpack.patch(model)
    model = with_lora(model)
    if first == "peft":
        tritonpack.patch(model)
    head = model.base_model.model
    for form in FORMS[:3]:
        assert difference(packed(model, form), expected) < EXACT, form
        assert difference(gradients(head.forward(input_ids=ids, **told(form)).logits, model), expected) < EXACT, form
        hidden = head.model.forward(input_ids=ids, **told(form))[0]
        assert difference(gradients(head.lm_head(hidden), model), expected) < EXACT, form


@pytest.mark.parametrize("first", ["patch", "peft"])
def test_merging(first: str, tmp_path: Any) -> None:
    """The merged model is still patched, gives what adapters and base gave together, and can be unpatched and saved."""
    base = tiny_model("mistral")
    before = state(base)
    if first == "patch":
        tritonpack.patch(base)
    model = with_lora(base)
    if first == "peft":
        tritonpack.patch(model)
    ids = torch.cat(documents(), 1)
    expected = model(input_ids=ids, **told()).logits
    merged = model.merge_and_unload()
    assert apart(merged(input_ids=ids, **told()).logits, expected) < EXACT
    tritonpack.unpatch(merged)
    assert state(merged) == before
    assert apart(torch.cat([merged(d).logits for d in documents()], 1), expected) < EXACT
    merged.save_pretrained(tmp_path)
    assert "tritonpack" not in (tmp_path / "config.json").read_text()


def test_saved_adapters_hold_no_trace(tmp_path: Any) -> None:
    tiny_model("mistral").save_pretrained(tmp_path / "base")
    model = with_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64))
    expected = alone(model)
    tritonpack.register()
    tritonpack.patch(model)
    model.save_pretrained(tmp_path / "adapter")
    assert not [path for path in (tmp_path / "adapter").glob("*.json") if "tritonpack" in path.read_text()]
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float64, attn_implementation="tritonpack"
    )
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).to(torch.float64)
    assert difference(packed(again), expected) < EXACT


VIRTUAL = {
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=8),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("kind", VIRTUAL)
def test_virtual_tokens(kind: str) -> None:
    """They come before a row, and with them a mask of floats. Before each of several documents in a row they can't."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("mistral"), VIRTUAL[kind]()).double().eval()
    rows = documents()
    ids = nn.utils.rnn.pad_sequence([d[0] for d in rows], batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(d[0]) for d in rows], batch_first=True)
    expected = model(input_ids=ids, attention_mask=mask).logits
    seen = nn.functional.pad(mask, (expected.shape[1] - mask.shape[1], 0), value=1).bool()
    with tritonpack.patch(model):
        got = model(input_ids=ids, attention_mask=mask).logits
        assert apart(got[seen], expected[seen]) < EXACT
        with pytest.raises(ValueError, match=r"virtual tokens \(PEFT's\)"):
            model(input_ids=ids.flip(1), attention_mask=mask.flip(1))
        for form in FORMS:
            with pytest.raises(ValueError, match=r"3 virtual tokens \(P.*TUNING\) before each row.* Give each doc"):
                model(input_ids=torch.cat(rows, 1), **told(form))
        model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert applied_to(model) == []
    assert not model._forward_pre_hooks
    below = tritonpack.patch(model.base_model)  # PEFT's wrapper isn't patched
    with below, pytest.raises(ValueError, match=r"virtual tokens \(PEFT's\)|the cache already holds tokens"):
        model(input_ids=torch.cat(rows, 1), **told("collator"))
