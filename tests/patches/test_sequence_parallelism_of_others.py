"""DeepSpeed's Ulysses and torch's context parallelism around a patched model: refused in the call."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tritonpack
from tests.patches.zoo import tiny_model

MIXED = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "position_ids": torch.tensor([[0, 1, 0, 1]])}
# Attention of the interface, outside of it, and recurrent layers alone.
FAMILIES = ("llama", "falcon", "mamba")


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
def test_ulysses_around_tritonpacks_attention_is_refused(family: str, attention: Any) -> None:
    model = tiny_model(family, dtype=torch.float32)
    with tritonpack.patch(model, attention=attention):
        expected = model(**MIXED).logits
        with (
            ulysses(model.config._attn_implementation),
            pytest.raises(tritonpack.UnsupportedModelError, match=r"Ulysses.*tritonpack\.SequenceParallel"),
        ):
            model(**MIXED)
        assert torch.equal(model(**MIXED).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
@pytest.mark.fast("sdpa-llama", "flash_attention_2-llama", "sdpa-mamba")
def test_ulysses_around_another_attention_is_refused(name: str, family: str) -> None:
    """Nothing calls Ulysses then, so a token would see only the tokens of its rank."""
    model = tiny_model(family, dtype=torch.float32)
    with ulysses(name), tritonpack.patch(model), pytest.raises(tritonpack.UnsupportedModelError, match="Ulysses"):
        model(**MIXED)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone, which context parallelism shards over."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def in_context_parallelism(mesh: Any, model: Any) -> torch.Tensor:
    own = {name: x.clone() for name, x in MIXED.items()}  # sharded in place
    with context_parallel(mesh, buffers=[*own.values()], buffer_seq_dims=[1, 1]):
        return model(**own).logits


@pytest.mark.parametrize(
    ("attention", "family"), [*(("tritonpack", family) for family in FAMILIES), ("sdpa", "llama"), ("eager", "llama")]
)
@pytest.mark.fast("tritonpack-llama", "tritonpack-mamba")
def test_context_parallelism_is_refused(mesh: Any, attention: Any, family: str) -> None:
    model = tiny_model(family, dtype=torch.float32)
    with tritonpack.patch(model, attention=attention):
        expected = model(**MIXED).logits
        remedy = r"context parallelism.*tritonpack\.SequenceParallel\(model, group, exchange='ring', layout='zigzag'\)"
        with pytest.raises(tritonpack.UnsupportedModelError, match=remedy):
            in_context_parallelism(mesh, model)
        assert torch.equal(model(**MIXED).logits, expected)


@pytest.mark.slow
def test_context_parallelism_is_refused_in_a_compiled_model(mesh: Any) -> None:
    """A graph from before the context isn't used inside of it."""
    model = tiny_model("llama", dtype=torch.float32)
    with tritonpack.patch(model):
        compiled = torch.compile(model, backend="eager")
        compiled(**MIXED)
        with pytest.raises(Exception, match="context parallelism"):  # torch's error, around tritonpack's
            in_context_parallelism(mesh, compiled)


@pytest.mark.parametrize("first", ["patch", "accelerate"])
@pytest.mark.parametrize("family", ["llama", "xglm"])  # XGLM's attention is outside of transformers' interface
def test_layers_without_their_mask_are_refused(family: str, first: str) -> None:
    """accelerate's context parallelism removes the mask of layers also in calls outside of torch's context."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(family, dtype=torch.float32)
    if first == "patch":
        tritonpack.patch(model)
        model(**MIXED)
    accelerate.big_modeling._attach_context_parallel_hooks(model)
    if first == "accelerate":
        tritonpack.patch(model)
    with pytest.raises(tritonpack.UnsupportedModelError, match=r"cp_size\) removes the mask of .*SequenceParallel"):
        model(**MIXED)


def test_a_replaced_attention_function_is_refused() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    with (
        tritonpack.patch(model),
        ulysses("tritonpack", "another.library"),
        pytest.raises(tritonpack.UnsupportedModelError, match=r"'tritonpack' was replaced by another\.library\."),
    ):
        model(**MIXED)


def test_other_replaced_functions_are_accepted() -> None:
    """Only DeepSpeed's function is known to share rows between ranks."""
    model = tiny_model("llama", dtype=torch.float32)
    with ulysses("sdpa", "another.library"), tritonpack.patch(model):
        assert model(**MIXED).logits.isfinite().all()
