"""Classes that tritonpack doesn't know: a small copy is tried when a model is patched."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

import tritonpack
from tests.patches import zoo
from tests.patches.models import VOCAB, tiny_model
from tritonpack.patches import model_forward, probe
from tritonpack.patches.trial.subject import subject_of
from tritonpack.testing import check_isolation

pytestmark = pytest.mark.usefixtures("trials")


class StrangerConfig(PreTrainedConfig):
    model_type = "stranger"
    hidden_size: int = 16
    num_hidden_layers: int = 1
    vocab_size: int = VOCAB
    uses_mask: bool = True


class Stranger(PreTrainedModel):
    """A user's own model: its attention doesn't use transformers' interface and adds the mask to its scores."""

    config_class = StrangerConfig
    _supports_sdpa = True

    def __init__(self, config: StrangerConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor]:
        hidden = self.embed(input_ids)
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids, allow_is_causal_skip=False)
        query, key, value = self.qkv(hidden)[:, None].chunk(3, dim=-1)
        scores = query @ key.transpose(2, 3)
        if self.config.uses_mask and isinstance(mask, Tensor) and mask.dtype == torch.bool:  # stock sdpa's
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif self.config.uses_mask:
            scores = scores + mask
        else:
            scores = scores + torch.full_like(scores[0, 0], -1e9).triu(1)
        return ((scores.softmax(-1) @ value)[:, 0],)


def stranger(**changes: Any) -> Stranger:
    torch.manual_seed(0)
    return Stranger(StrangerConfig(**changes)).double().eval()


def test_a_model_that_uses_its_mask_is_accepted(trials: list[Any]) -> None:
    model = stranger()
    documents = zoo.documents((7, 1, 3, 11))
    alone = torch.cat([model(d)[0] for d in documents], dim=1)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with tritonpack.patch(model):
        torch.testing.assert_close(model(torch.cat(documents, 1), position_ids=places)[0], alone)
    assert len(trials) == 1
    tritonpack.patch(stranger(hidden_size=32, num_hidden_layers=7).to(torch.bfloat16))
    assert len(trials) == 2  # another small configuration
    tritonpack.patch(stranger().to(torch.bfloat16))
    assert len(trials) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_makes_its_own_mask_is_refused(dtype: torch.dtype, trials: list[Any]) -> None:
    model = stranger(uses_mask=False).to(dtype)
    for _ in range(2):
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"Stranger isn't a model.*stay apart"):
            tritonpack.patch(model)
    assert len(trials) == 1
    assert not model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"


def test_each_kind_of_attention_is_tried() -> None:
    """A verdict on one kind of attention isn't used for another."""
    model = stranger()
    tritonpack.patch(model).unpatch()
    tritonpack.patch(model, attention="eager").unpatch()
    assert [key[1].attention for key in probe._verdicts] == ["tritonpack", "eager"]


# In whatever context of the caller, the trial runs on the CPU in float32 and leaves no trace.


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def without_ties() -> Iterator[None]:
    from transformers.initialization import no_tie_weights

    with no_tie_weights():
        yield


@contextlib.contextmanager
def without_initial_weights() -> Iterator[None]:
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


CONTEXTS: dict[str, Any] = {
    "meta": lambda: torch.device("meta"),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake_tensors": fake_tensors,
    "no_tie_weights": without_ties,
    "no_init_weights": without_initial_weights,
}


class Unshown(LlamaForCausalLM):
    """A subclass, which isn't in the table of shown classes."""


class Particular(LlamaForCausalLM):
    """A model with a part that fills its weights itself, and one in the default dtype."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(config.vocab_size))
        nn.init.ones_(self.scale)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = (output.logits @ torch.eye(VOCAB)) * self.scale
        return output


class Mixing(LlamaForCausalLM):
    """A model in which each token's logits contain those of all tokens before it in the row."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + 0.1 * output.logits.cumsum(1)
        return output


def llama_config(**more: Any) -> LlamaConfig:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaConfig(**sizes, num_hidden_layers=2, **more)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.sampled("fake_tensors", "meta", "bfloat16", "inference_mode", "autocast")
def test_a_trial_in_any_context(context: str, trials: list[Any]) -> None:
    """Models may be built and patched in these contexts."""
    state = torch.get_rng_state()
    with CONTEXTS[context]():
        dtype = torch.get_default_dtype()
        model, wrong = Particular(llama_config()), Mixing(llama_config())
        after = torch.get_rng_state() if context != "fake_tensors" else None
        tritonpack.patch(model)
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"position_ids: .* from another document"):
            tritonpack.patch(wrong)
        assert torch.get_default_dtype() == dtype
        assert after is None or torch.equal(torch.get_rng_state(), after)
    assert len(trials) == 2
    assert after is not None or torch.equal(torch.get_rng_state(), state)


def test_a_trial_needs_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = Unshown(llama_config())
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"patch it outside of init_empty_weights"):
            tritonpack.patch(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_while_a_model_is_loaded(dtype: torch.dtype, tmp_path: Path, trials: list[Any]) -> None:
    """A model that is loaded by name is patched when it is built, without weights and in another default dtype."""
    Unshown(llama_config()).save_pretrained(tmp_path)
    model = Unshown.from_pretrained(tmp_path, attn_implementation="tritonpack", dtype=dtype)
    assert len(trials) == 1
    assert not any(p.is_meta for p in model.parameters())
    ids, places = torch.full((1, 6), 9), torch.tensor([[0, 1, 2, 0, 1, 2]])
    first, second = model(ids, position_ids=places).logits.chunk(2, dim=1)
    assert torch.equal(first, second)
    with pytest.raises(tritonpack.UnsupportedModelError, match="Mixing isn't a model that tritonpack knows"):
        Mixing.from_pretrained(tmp_path, attn_implementation="tritonpack", dtype=dtype)(ids)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_the_longest_document_are_accepted(kind: str, trials: list[Any]) -> None:
    """A call is refused if its documents are on both sides of the length at which the embeddings change."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
        rope |= {**factors, "original_max_position_embeddings": 4096}
    tritonpack.patch(Unshown(llama_config(rope_parameters=rope))).unpatch()
    assert len(trials) == 1


def test_a_trial_under_a_default_device(trials: list[Any]) -> None:
    """The default device is set for the whole thread, not in a context."""
    model = Unshown(llama_config())
    torch.set_default_device("meta")
    try:
        tritonpack.patch(model)
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)
    assert len(trials) == 1


def test_a_class_that_patches_its_instances_is_tried_once(trials: list[Any]) -> None:
    """Its small copy is patched too, while it is built, but not tried."""

    class SelfPatching(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            tritonpack.patch(self)

    SelfPatching(llama_config())
    assert len(trials) == 1


def test_a_known_class_is_not_tried(trials: list[Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo.tiny_config("llama"))
    tritonpack.patch(model).unpatch()
    assert not trials


def test_a_known_class_is_tried_with_another_transformers(trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonpack.patches import exact_classes

    library = exact_classes.transformers  # other tests may import transformers anew
    monkeypatch.setattr(library, "__version__", "6.1.0.dev0")
    tritonpack.patch(tiny_model("llama")).unpatch()
    assert len(trials) == 1


def test_a_wrapper_of_a_known_class_is_not_tried(trials: list[Any]) -> None:
    """FSDP's fully_shard makes a subclass, and a user's module may hold a model."""
    model = tiny_model("llama")
    for module in (model, *model.model.layers):
        kind = type(module)
        module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": "torch.distributed.fsdp"})
    tritonpack.patch(nn.ModuleDict({"policy": model}))
    assert not trials


def test_a_trial_leaves_the_model_as_it_was() -> None:
    model = stranger().train()
    model.qkv.eval()
    before, random_state = [m.training for m in model.modules()], torch.get_rng_state()
    with tritonpack.patch(model):
        pass
    assert [m.training for m in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in model.parameters())


def test_trials_draw_no_token_that_the_configuration_names() -> None:
    """Placeholders of images and padding of parts aren't text."""
    model = stranger(media_token_ids=list(range(30)), text=StrangerConfig(image_token_index=63, pad_token_id=62))
    tried = set(torch.cat(subject_of(model).draw((500,), 1), dim=1).flatten().tolist())
    assert tried <= set(range(30, 62))


# A small copy must run all code of the model; otherwise the model itself is tried, in a float32 copy.


def test_a_class_that_takes_more_than_a_configuration_is_tried_itself(trials: list[Any]) -> None:
    class TakesMore(LlamaForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    model = TakesMore(llama_config(), 1).to(torch.bfloat16)
    tritonpack.patch(model).unpatch()
    tritonpack.patch(model).unpatch()
    assert len(trials) == 3  # a small copy can't be built, the second time neither
    assert model.dtype == torch.bfloat16
    with torch.device("meta"):
        empty = TakesMore(llama_config(), 1)
    tritonpack.patch(empty).unpatch()  # of a model with the same configuration the trial has told


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda model, monkeypatch: model.to("meta"), "on the meta device"),
        (lambda model, monkeypatch: monkeypatch.setattr(probe, "MOST_PARAMETERS", 100), "parameters are too many"),
        (lambda model, monkeypatch: monkeypatch.setattr(probe, "LONGEST_REACH", 3), "its window or chunk of 4 tokens"),
        (lambda model, monkeypatch: model.lm_head.register_parameter("bits", frozen()), "sharded or quantized"),
        (lambda model, monkeypatch: setattr(model, "lock", threading.Lock()), "it can't be copied: TypeError"),
        (lambda model, monkeypatch: setattr(model, "lm_head", nn.Linear(3, 3)), "doesn't run on tokens alone"),
    ],
    ids=["meta", "large", "window", "quantized", "copied", "broken"],
)
def test_a_model_that_cannot_be_tried_is_refused(prepare: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was tried, and what to do."""

    class TakesMore(MistralForCausalLM):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    model = TakesMore(zoo.tiny_config("mistral"), 1)
    prepare(model, monkeypatch)
    message = (
        f"TakesMore isn't a model that tritonpack knows.*a small copy on cpu: it can't be built: .*'more'.*{reason}"
    )
    with pytest.raises(tritonpack.UnsupportedModelError, match=message) as raised:
        tritonpack.patch(model)
    assert "built from its configuration alone" in str(raised.value)
    assert not model._forward_pre_hooks


def frozen() -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)


def test_documents_are_longer_than_the_windows_of_a_model_tried_itself() -> None:
    """A small copy would have short windows; this model keeps its own."""

    class TakesMore(WindowIgnored):
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    wide = zoo.tiny_config("mistral", sliding_window=40)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"position_ids: logits: \d"):
        tritonpack.patch(TakesMore(wide, 1))


@pytest.mark.parametrize("small", [True, False])
def test_a_trial_applies_a_softcap_that_sdpa_drops(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers up to 5.17. Documents alone run by eager attention, in a small copy or the model itself."""

    def dropping(*args: Any, softcap: Any = None, **options: Any) -> Any:
        return sdpa_attention_forward(*args, **options)

    class Own(Gemma2ForCausalLM):
        def __init__(self, config: Any, **more: bool) -> None:
            super().__init__(config)
            if not small and not more:
                raise ValueError("it needs more than a configuration")

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", dropping)
    model = Own(zoo.tiny_config("gemma2", attn_logit_softcapping=0.5), more=True)
    assert model.config._attn_implementation == "sdpa"
    assert tritonpack.patch(model).report.attention == "tritonpack"
    assert model.config._attn_implementation == "tritonpack"
    tritonpack.unpatch(model)
    with pytest.raises(
        tritonpack.UnsupportedModelError, match=r"doesn't support sdpa with its softcap; use attention='eager'"
    ):
        tritonpack.patch(model, attention="sdpa")


class WindowIgnored(MistralForCausalLM):
    """A model that ignores its window unless it gets position ids."""

    def forward(self, input_ids: Tensor, position_ids: Any = None, **kwargs: Any) -> Any:
        window = self.config.sliding_window
        if position_ids is None:
            self.config.sliding_window = 10**6
        try:
            return super().forward(input_ids, position_ids=position_ids, **kwargs)
        finally:
            self.config.sliding_window = window


ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("config", [BertConfig(**ENCODER), ModernBertConfig(**ENCODER, local_attention=8)], ids=repr)
def test_encoders_are_accepted(config: PreTrainedConfig) -> None:
    """Attention sees both directions, with and without windows."""
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config).double().eval()
    with tritonpack.patch(model):
        check_isolation(model)


@pytest.mark.heavy
def test_heads_that_refuse_packed_rows_are_accepted(trials: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows are tried in them, and packed rows in the model inside."""
    monkeypatch.setattr(probe, "is_shown", lambda kind: False)
    model = AutoModelForSequenceClassification.from_config(zoo.tiny_config("llama"))
    tritonpack.patch(model).unpatch()
    monkeypatch.setattr(model_forward, "ONE_DOCUMENT_A_ROW", re.compile("none"))
    monkeypatch.setattr(model_forward.ModelForward, "_require_nothing_of_rows", lambda *args: None)
    monkeypatch.setattr(probe, "_verdicts", {})
    with pytest.raises(
        tritonpack.UnsupportedModelError, match=r"position_ids: logits has shape \(1, 2\) for 4 documents"
    ):
        tritonpack.patch(model)
    assert len(trials) == 3  # of the head, of the model inside of it, and of what is no such head
