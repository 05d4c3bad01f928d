"""The first call of a patched model finds code that was replaced after the patch."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel

import tritonpack
from tests.patches import sweep, zoo
from tests.patches.foreign import Replacement, attends_by_itself, attends_by_the_interface
from tests.patches.models import Graphs, tiny_model
from tritonpack.patches.first_call import Watch
from tritonpack.patches.hooks import PackingHook
from tritonpack.testing import check_isolation

refused = pytest.raises(tritonpack.UnsupportedModelError, match="don't attend through tritonpack")


def hooks_of(model: nn.Module) -> list[PackingHook]:
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, PackingHook)]


def of_watch(hook: Any) -> bool:
    return isinstance(hook, Watch) or isinstance(getattr(getattr(hook, "func", None), "__self__", None), Watch)


def is_watching(model: nn.Module) -> bool:
    """Whether a watch or its hooks are left, or a first call is still to be watched."""
    hooks = [hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    return any(map(of_watch, hooks)) or all(not hook.first_call.done for hook in hooks_of(model))


def call(model: PreTrainedModel) -> Tensor:
    return sweep.logits(model, sweep.FORMS["without_cache"](zoo.documents((7, 3, 5))))


@pytest.fixture
def llama() -> Iterator[PreTrainedModel]:
    with tritonpack.patch(tiny_model("llama")) as handle:
        yield handle.model


def bypass_layers(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A forward that fuses a whole layer, so that its attention is never called."""
    hidden_states = hidden_states + attends_by_itself(self.self_attn, self.input_layernorm(hidden_states), **kwargs)[0]
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def bypass_all(self: Any, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
    """A forward that fuses a whole model."""
    hidden_states = self.embed_tokens(input_ids)
    positions = self.rotary_emb(hidden_states, position_ids)
    for layer in self.layers:
        hidden_states = bypass_layers(layer, hidden_states, position_embeddings=positions)
    return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


def mask_of_its_own(*args: Any, **kwargs: Any) -> Tensor:
    return torch.ones(15, 15, dtype=torch.bool).tril()[None, None]


REPLACED: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "class": (
        lambda model, patch: patch.setattr(LlamaAttention, "forward", attends_by_itself),
        r"layers.0.self_attn \(LlamaAttention, which runs tests.patches.foreign.attends_by_itself\), layers.1.self_a",
    ),
    "instance": (
        lambda model, patch: patch.setattr(layer(model), "forward", attends_by_itself.__get__(layer(model))),
        r"each other: layers.1.self_attn \(LlamaAttention, .*attends_by_itself\)\. Their",
    ),
    "module": (
        lambda model, patch: patch.setitem(model.model.layers[1]._modules, "self_attn", Replacement(layer(model))),
        r"each other: layers.1.self_attn \(Replacement, which runs tests.patches.foreign.Replacement.forw.*\)\. Their",
    ),
    "layer": (
        lambda model, patch: patch.setattr(LlamaDecoderLayer, "forward", bypass_layers),
        r"each other: layers.0 \(LlamaDecoderLayer, .*bypass_layers\), layers.1 \(",
    ),
    "model": (lambda model, patch: patch.setattr(LlamaModel, "forward", bypass_all), r"each other: layers.0 \(Llama"),
    "mask": (
        lambda model, patch: patch.setattr(modeling_llama, "create_causal_mask", mask_of_its_own),
        r"each other: layers.0.self_attn \(LlamaAttention, which runs transformers\.",
    ),
}


def layer(model: Any) -> Any:
    return model.model.layers[1].self_attn


@pytest.mark.parametrize("attention", ["tritonpack", "eager"])
@pytest.mark.parametrize("what", REPLACED)
def test_code_replaced_after_the_patch_is_refused(what: str, attention: Any, monkeypatch: Any) -> None:
    replace, message = REPLACED[what]
    model = tiny_model("llama")
    with tritonpack.patch(model, attention=attention):
        replace(model, monkeypatch)
        for _ in range(2):  # it isn't forgotten
            with pytest.raises(tritonpack.UnsupportedModelError, match=message) as raised:
                call(model)
        assert "Call tritonpack.unpatch(model), and patch the model after all other changes" in str(raised.value)
        monkeypatch.undo()
        call(model)
        assert not is_watching(model)


def test_no_hook_is_left_after_the_first_call(llama: PreTrainedModel) -> None:
    assert is_watching(llama)
    call(llama)
    assert not is_watching(llama)


def test_replaced_code_that_uses_the_mask_is_accepted(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch requires that the mask is used, whoever wrote the code."""
    monkeypatch.setattr(LlamaAttention, "forward", attends_by_the_interface)
    check_isolation(llama)
    assert not is_watching(llama)


def test_replaced_dense_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the mask as a tensor, whose use can't be seen, so the code must be the same."""
    model = zoo.tiny_model("gpt_neo")
    own = GPTNeoSelfAttention.forward
    with tritonpack.patch(model):
        monkeypatch.setattr(GPTNeoSelfAttention, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"h.0.attn.attention \(GPTNeoSelfAttention"):
            call(model)
        monkeypatch.undo()
        call(model)
        assert not is_watching(model)


def test_a_model_that_makes_no_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.tiny_model("gpt_neo")
    with tritonpack.patch(model):
        monkeypatch.setattr(modeling_gpt_neo, "create_causal_mask", mask_of_its_own)
        with pytest.raises(tritonpack.UnsupportedModelError, match=r"the model itself \(GPTNeoModel"):
            call(model)


# What is done to models, and is no replacement.


def test_skipped_layers_are_accepted() -> None:
    """Layers may be cut off after the patch, left out by the number in the configuration, or dropped at random."""
    model = tiny_model("llama", num_hidden_layers=3)
    with tritonpack.patch(model):
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 1
        call(model)
        assert not is_watching(model)
    model = zoo.tiny_model("opt", layerdrop=0.5, num_hidden_layers=8).train()
    with tritonpack.patch(model):
        call(model)
        assert not is_watching(model)
    model = zoo.tiny_model("opt", layerdrop=1.0).train()
    with tritonpack.patch(model):
        call(model)


@pytest.mark.parametrize("name", ["bart", "gemma3", "mamba", "nemotron_h", "openai-gpt", "qwen4_exp_text", "xlnet"])
def test_models_with_other_layers_are_accepted(name: str) -> None:
    """Cross-attention that isn't called, towers, recurrences, and masks written out as tensors."""
    model = zoo.tiny_model(name)
    with tritonpack.patch(model):
        call(model)
        assert not is_watching(model)


def test_a_decoder_is_watched_in_its_own_first_call() -> None:
    """The model around a decoder makes the mask of cross-attention; the second call watches the decoder."""
    model = zoo.tiny_model("musicgen")
    ids = zoo.documents((5,))[0]
    arguments = {**zoo.call(model, ids), "encoder_hidden_states": torch.randn(1, 4, model.config.hidden_size)}
    expected = model(**arguments).logits
    with tritonpack.patch(model):
        for _ in range(3):
            torch.testing.assert_close(model(**arguments).logits, expected)
        assert not is_watching(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(llama: PreTrainedModel, reentrant: bool) -> None:
    llama.train().enable_input_require_grads()
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    call(llama).sum().backward()
    assert not is_watching(llama)


def test_layers_may_share_their_attention(llama: PreTrainedModel) -> None:
    llama.model.layers[1].self_attn = llama.model.layers[0].self_attn
    call(llama)
    assert not is_watching(llama)


class Wrapper(nn.Module):
    """A wrapper such as torch's CheckpointWrapper, which runs and recomputes a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._checkpoint_wrapped_module, *args, use_reentrant=False, **kwargs)


def test_wrapped_layers_are_found_by_name(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers change the names of layers."""
    for i, own in enumerate(llama.model.layers):
        llama.model.layers[i] = Wrapper(own)
    monkeypatch.setattr(LlamaAttention, "forward", attends_by_itself)
    with refused:
        call(llama)
    monkeypatch.undo()
    call(llama).sum().backward()
    assert not is_watching(llama)


def test_the_call_after_a_failed_one_is_watched(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IndexError):
        llama(input_ids=torch.full((1, 3), 10**6))
    assert is_watching(llama)
    assert not any(module._forward_hooks for module in llama.modules())
    call(llama)
    assert not is_watching(llama)


def test_the_call_after_an_interrupted_one_is_watched(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls no hook after an interrupt; the next call removes what is left."""

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaAttention, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(llama)
    monkeypatch.undo()
    call(llama)
    assert not is_watching(llama)


def test_threads_watch_their_own_calls(llama: PreTrainedModel) -> None:
    """Several threads call a model for the first time at once."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            for _ in range(20):
                call(llama)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not any(isinstance(h, Watch) for module in llama.modules() for h in module._forward_hooks.values())


def test_copies_are_watched(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    pickle.dump(llama, file)
    file.seek(0)
    for twin in (copy.deepcopy(llama), pickle.load(file)):
        assert is_watching(twin)
        with monkeypatch.context() as patched:
            patched.setattr(LlamaAttention, "forward", attends_by_itself)
            with refused:
                call(twin)
        call(twin)
        assert not is_watching(twin)
    assert is_watching(llama)


def test_the_first_call_after_generation_is_watched(llama: PreTrainedModel) -> None:
    """Masks of calls with a cache aren't the masks of the call's tokens, so those calls aren't watched."""
    llama.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, do_sample=False)
    call(llama)
    assert not is_watching(llama)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", ["whole", "layers", "layers in place"])
@pytest.mark.sampled("layers")
def test_compiled_code_is_not_watched(part: str) -> None:
    """There is one graph from the first call on; no hook makes another."""
    graphs = Graphs()
    model = tiny_model("llama", num_hidden_layers=1, dtype=torch.float32)
    options: Any = {"backend": graphs, "fullgraph": True, "dynamic": True}
    with tritonpack.patch(model):
        forward = model
        if part == "whole":
            forward = torch.compile(model, **options)
        elif part == "layers":
            model.model.layers[0] = torch.compile(model.model.layers[0], **options)
        else:
            model.model.layers[0].compile(**options)
        for total in (12, 9, 20):
            ids, places = torch.randint(3, 60, (1, total)), (torch.arange(total) % 7)[None]
            forward(input_ids=ids, position_ids=places, use_cache=False)
    assert graphs.count == 1
