"""Other libraries' sequence parallelism and transformers' continuous batching around a patched model: refused."""

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def ulysses(name: str, home: str = "deepspeed.runtime.sequence_parallel.ulysses_sp") -> Iterator[None]:
    """Replace an attention function as DeepSpeed does: by a function under the same name, which drops the mask."""
    core = ALL_ATTENTION_FUNCTIONS[name]

    def uattn_wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return core(module, query, key, value, None, **kwargs)

    uattn_wrapper.__module__ = home
    ALL_ATTENTION_FUNCTIONS[name] = uattn_wrapper
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@pytest.mark.parametrize("family", ["llama", "falcon"])  # Falcon's attention looks up no function
@pytest.mark.parametrize("attention", ["tritonpack", "sdpa"])
def test_ulysses_around_tritonpacks_attention(family: str, attention: Any) -> None:
    model = tiny_model(family)
    with tritonpack.patch(model, attention=attention):
        expected = model(**MIXED).logits
        name, words = model.config._attn_implementation, r"Ulysses.*tritonpack\.SequenceParallel"
        with ulysses(name), pytest.raises(UnsupportedModelError, match=words):
            model(**MIXED)
        assert torch.equal(model(**MIXED).logits, expected)


@pytest.mark.parametrize("family", ["llama", "falcon", "mamba"])
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
def test_ulysses_around_another_attention(name: str, family: str) -> None:
    """Nothing calls Ulysses then, so a token would see only the tokens of its rank."""
    model = tiny_model(family)
    with ulysses(name), tritonpack.patch(model), pytest.raises(UnsupportedModelError, match="Ulysses"):
        model(**MIXED)


def test_other_replaced_functions() -> None:
    """Only DeepSpeed's function is known to share rows between ranks."""
    model = tiny_model("llama")
    with ulysses("sdpa", "another.library"), tritonpack.patch(model):
        assert model(**MIXED).logits.isfinite().all()
    words = r"'tritonpack' was replaced by another\.library\."
    with tritonpack.patch(model), ulysses("tritonpack", "another.library"):  # noqa: SIM117
        with pytest.raises(UnsupportedModelError, match=words):
            model(**MIXED)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone, which context parallelism shards over."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("attention", "family"),
    [("tritonpack", "llama"), ("tritonpack", "falcon"), ("tritonpack", "mamba"), ("sdpa", "llama"), ("eager", "llama")],
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
