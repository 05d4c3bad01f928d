"""Functions of tests/gpu on the virtual GPU: the tier that waits for a GPU is able to pass. And a patched model."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")
pytest.importorskip("transformers")

import tritonpack
from tests import invariance
from tests.gpu import test_gpu, test_models
from tests.patches import zoo
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import VirtualGPU, virtual_gpu
from tests.virtual_gpu.test_attention import SHORT
from tritonpack import backends
from tritonpack.testing import CASES

pytestmark = NEEDS


class _HostIsCuda(TorchFunctionMode):
    """Calls for the device "cuda" get host memory, which the virtual GPU uses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*map(_on_host, args), **given)


def _on_host(x: Any) -> Any:
    return "cpu" if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x


@contextmanager
def as_cuda(arch: str) -> Iterator[VirtualGPU]:
    """A virtual GPU for programs that ask for "cuda"; "auto" is the backend "triton"."""
    own = backends.resolve_backend

    def resolve(backend: Any, q: torch.Tensor) -> str:
        return own("triton" if backend == "auto" else backend, q)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("tritonpack") and getattr(module, "resolve_backend", None) is own:
                stack.callback(setattr, module, "resolve_backend", own)
                module.resolve_backend = resolve  # type: ignore[attr-defined]
        stack.enter_context(_HostIsCuda())
        yield stack.enter_context(virtual_gpu(arch))


BF16 = torch.bfloat16
INVARIANT = invariance.CASES[0]
# Functions of tests/gpu, and their arguments
FUNCTIONS: dict[str, Callable[[], None]] = {
    "causal": lambda: test_gpu.test_large_cases(CASES[0], torch.float16),
    "ordinary": lambda: test_gpu.test_large_cases(SHORT[1], BF16),
    **{name: partial(test_gpu.test_pack_invariant_documents_have_the_same_bits_in_every_pack, INVARIANT, poison, BF16)
       for name, poison in (("pack-invariant", ()), ("nan", invariance.POISONS[0]))},
    "bounds": test_gpu.test_validate_finds_bad_bounds_on_the_device,
    "waiting": test_gpu.test_nothing_waits_for_the_host,
    "isolation": test_gpu.test_a_change_in_a_document_changes_no_other_bit,
    **{name: partial(test_models.test_documents_stay_apart, name, BF16) for name in test_models.KINDS},
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.slow
def test_function(name: str) -> None:
    with as_cuda("sm_90"):
        FUNCTIONS[name]()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.fast("llama")
def test_a_training_step(name: str) -> None:
    """Loss and gradients of a packed batch in bfloat16: as near to float32's as the backend in torch comes."""
    model = zoo.tiny_model(name).to(torch.bfloat16)
    ids = torch.randint(10, zoo.VOCAB, (1, 150))
    places = torch.cat([torch.arange(n) for n in (90, 1, 40, 19)])[None]
    labels = ids.masked_fill(places == 0, -100)

    def gradients(backend: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        model.to(dtype)
        with tritonpack.patch(model, backend=backend):
            loss = model(ids, position_ids=places, labels=labels, use_cache=False).loss
            return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]

    exact = gradients("reference", torch.float32)
    plain = gradients("reference", torch.bfloat16)
    with virtual_gpu("sm_90") as gpu:
        kernels = gradients("triton", torch.bfloat16)
    assert {"forward_kernel", "dq_kernel", "dkdv_kernel"} <= set(gpu.launches.kernels)
    for expected, other, got in zip(exact, plain, kernels, strict=True):
        error, allowed = ((x - expected).abs().max() for x in (got, other))
        assert error <= 2 * allowed + 1e-2 * expected.abs().max()
