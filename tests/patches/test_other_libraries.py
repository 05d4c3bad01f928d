"""Other libraries' sequence parallelism and transformers' continuous batching around a patched model: refused."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tritonpack
from tests.patches.zoo import tiny_model
from tritonpack import UnsupportedModelError

MIXED = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}


DEEPSPEED = "deepspeed.runtime.sequence_parallel.ulysses_sp"


def replace(patch: pytest.MonkeyPatch, name: str, home: str) -> None:
    """Replace an attention function as DeepSpeed does, by one under the same name which drops the mask; or remove
    it, as in a process that unpickled a patched model."""
    core = ALL_ATTENTION_FUNCTIONS[name]

    def uattn_wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return core(module, query, key, value, None, **kwargs)

    uattn_wrapper.__module__ = home
    functions = {**ALL_ATTENTION_FUNCTIONS._global_mapping, name: uattn_wrapper}
    patch.setattr(type(ALL_ATTENTION_FUNCTIONS), "_global_mapping", functions)
    if not home:
        del functions[name]


ULYSSES = r"Ulysses.*tritonpack\.SequenceParallel"
ALL = "llama falcon mamba"  # Falcon's attention looks up no function, and Mamba has none
# The function that is replaced and by whom, the attention of patch(), families, words. Only DeepSpeed's function is
# known to share rows between ranks: around another attention nothing calls it, and a token sees only its rank's tokens.
REPLACED: list[tuple[str, str, Any, str, str]] = [
    ("tritonpack", DEEPSPEED, "tritonpack", ALL, ULYSSES),
    ("sdpa", DEEPSPEED, "sdpa", "llama falcon", ULYSSES),
    ("sdpa", DEEPSPEED, "tritonpack", ALL, "Ulysses"),
    ("flash_attention_2", DEEPSPEED, "tritonpack", ALL, "Ulysses"),
    ("sdpa", "another.library", "tritonpack", ALL, ""),
    ("tritonpack", "another.library", "tritonpack", "llama", r"'tritonpack' was replaced by another\.library\."),
    ("tritonpack", "", "tritonpack", "llama", r"'tritonpack' isn't registered in this process; call tritonpack\.regis"),
]


@pytest.mark.parametrize(("name", "home", "attention", "families", "words"), REPLACED)
def test_replaced_functions(
    name: str, home: str, attention: Any, families: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for family in families.split():
        model = tiny_model(family)
        with tritonpack.patch(model, attention=attention):
            expected = model(**MIXED).logits
            refused = pytest.raises(UnsupportedModelError, match=words) if words else contextlib.nullcontext()
            with monkeypatch.context() as patched, refused:
                replace(patched, name, home)
                assert torch.equal(model(**MIXED).logits, expected)
            assert torch.equal(model(**MIXED).logits, expected)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone, which context parallelism shards over."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("attention", "family"),
    [*(("tritonpack", family) for family in ALL.split()), ("sdpa", "llama"), ("eager", "llama")],
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_context_parallelism(mesh: Any, attention: Any, family: str, compiled: bool) -> None:
    """A graph from before the context isn't used inside of it."""
    model = tiny_model(family)
    remedy = r"context parallelism.*tritonpack\.SequenceParallel\(model, group, exchange='ring', layout='zigzag'\)"
    with tritonpack.patch(model, attention=attention):
        called = torch.compile(model, backend="eager") if compiled else model
        expected = called(**MIXED).logits
        own = {name: x.clone() for name, x in MIXED.items()}  # sharded in place
        refused = pytest.raises(Exception if compiled else UnsupportedModelError, match=remedy)
        with context_parallel(mesh, buffers=[*own.values()], buffer_seq_dims=[1, 1]), refused:
            called(**own)
        assert torch.equal(called(**MIXED).logits, expected)


@pytest.mark.parametrize("first", ["patch", "accelerate"])
@pytest.mark.parametrize("family", ["llama", "xglm"])  # XGLM's attention is outside of transformers' interface
def test_layers_without_their_mask(family: str, first: str) -> None:
    """accelerate's context parallelism removes the mask of layers also in calls outside of torch's context."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(family)
    if first == "patch":
        tritonpack.patch(model)
        model(**MIXED)
    accelerate.big_modeling._attach_context_parallel_hooks(model)
    if first == "accelerate":
        tritonpack.patch(model)
    with pytest.raises(UnsupportedModelError, match=r"cp_size\) removes the mask of .*SequenceParallel"):
        model(**MIXED)


def test_continuous_batching() -> None:
    """It brings attention of its own, so a patched model refuses it, and calls with its cache."""
    model, words = tiny_model("llama"), r"continuous batching .* tritonpack\.unpatch\(model\)"
    greedy = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1)
    sizes = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    options: dict[str, Any] = {"generation_config": greedy, "continuous_batching_config": sizes}
    with tritonpack.patch(model):
        with pytest.raises(UnsupportedModelError, match=words):
            model.generate_batch([[5, 6, 7]], **options)
        with pytest.raises(UnsupportedModelError, match=words):
            model(torch.tensor([[5, 6, 7]]), cache=object.__new__(PagedAttentionCache))
    model.init_continuous_batching(**options)
