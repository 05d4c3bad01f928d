"""Every launch of the package without a GPU: kernels are specialised, compiled, loaded and launched for sm_90."""

import importlib
import pkgutil
import shutil
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.launches import Call, calls
from tests.virtual_gpu.driver import Launches, fake_gpu
from tritonpack import BlockDiagonalMask, kernels
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.cases import parents_of
from tritonpack.testing.tolerance import run

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(shutil.which("cc") is None, reason="the fake libcuda needs a C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
]

QUICK = ("large-long-bf16", "tables-tree", "parents", "ids-codes", "dense-bool")


def compiled_calls() -> list[Call]:
    """Those in bfloat16 and of the largest cases; `python -m benchmarks.first_day --dry-run` has all."""
    return [c for c in calls() if c.name.startswith(("large-", "gluon-")) or not c.name.endswith(("fp16", "fp32"))]


@pytest.mark.parametrize("call", compiled_calls(), ids=str)
@pytest.mark.fast(*QUICK)
def test_call(call: Call) -> None:
    given = call.prepare("cpu")
    with fake_gpu() as launches:
        call.launch(given)
        assert call.kernels <= set(launches.kernels)


def on_other_gpus() -> list[Call]:
    """A sample, because kernels take long to compile."""
    prefixes = (
        "large-long-",
        "large-ordinary-",
        "large-s",
        "large-alibi-",
        "large-dropout-",
        "tree-bf16",
        "tables-tree",
    )
    return [call for call in calls() if call.name.startswith(prefixes) and not call.name.endswith(("fp16", "fp32"))]


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
@pytest.mark.parametrize("call", on_other_gpus(), ids=str)
@pytest.mark.slow
def test_call_on_other_gpus(call: Call, arch: str) -> None:
    given = call.prepare("cpu")
    with fake_gpu(arch) as launches:
        call.launch(given)
        assert call.kernels <= set(launches.kernels)


def test_every_kernel_is_in_a_call() -> None:
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        names = vars(importlib.import_module(f"tritonpack.kernels.{module.name}"))
        found |= {name for name, x in names.items() if isinstance(x, JITFunction) and name.endswith("_kernel")}
    assert len(found) > 10
    assert found == set().union(*(call.kernels for call in calls()))


def binaries(launches: Launches) -> dict[str, set[int]]:
    """The binaries of each kernel that was launched."""
    found: dict[str, set[int]] = defaultdict(set)
    for launch in launches:
        found[launch.kernel].add(launch.binary)
    return found


LENGTHS = ((300,), (333,), (512,), (1,), (16, 17), (1000, 24))


@pytest.mark.parametrize("backend", ["triton", pytest.param("gluon", marks=pytest.mark.slow)])
def test_one_binary_for_all_lengths(backend: str) -> None:
    cases = [Case("", lengths, heads=8, kv_heads=2, head_dim=128) for lengths in LENGTHS]
    given = [make_inputs(case, torch.bfloat16) for case in cases]
    with fake_gpu() as launches:
        for inputs in given:
            run(inputs, backend)
        assert len(launches) >= 3 * len(cases)
        assert len(launches) % len(cases) == 0  # as many for each
        assert {name: len(found) for name, found in binaries(launches).items() if len(found) > 1} == {}
        if backend == "gluon":
            assert {x.threads for x in launches if x.kernel.startswith("hopper_")} == {384}  # 288 were requested


def test_one_binary_for_whole_documents() -> None:
    masks = [BlockDiagonalMask.from_seqlens(list(lengths)) for lengths in LENGTHS]
    for mask in masks:
        mask.transpose()  # which is kept, so that its kernel isn't launched again
    with fake_gpu() as launches:
        for mask in masks:
            tile_tables(mask, Cut(32, 64, 128), Cut(128, of_keys=True), whole_documents=True)
        assert len(launches) == len(masks)
        assert {len(found) for found in binaries(launches).values()} == {1}


def test_one_binary_for_all_trees() -> None:
    forests = ([(-1, 300)], [(-1, 16), (0, 1)], [(-1, 1)], [(-1, 512), (0, 33), (0, 300)])
    masks = [replace(BlockDiagonalMask.from_tree(parents_of(forest)), trusted=True) for forest in forests]
    with fake_gpu() as launches:
        for mask in masks:
            tree_tables(mask, Cut(32, 64, 128), Cut(128, 64, 128, of_keys=True))
        assert len(launches) == 4 * len(masks)
        assert {len(found) for found in binaries(launches).values()} == {1}


@triton.jit
def add_kernel(desc, out_ptr, ROWS: tl.constexpr):  # noqa: N803
    """out [64]: the sums of the columns of a block of ROWS rows."""
    tl.store(out_ptr + tl.arange(0, 64), tl.sum(desc.load([0, 0]), 0))


class TestRefusals:
    """What a GPU's driver refuses fails without one, too."""

    x = torch.zeros(32, 64)

    def test_nothing_wrong(self) -> None:
        with fake_gpu() as launches:
            add_kernel[(3, 2)](TensorDescriptor.from_tensor(self.x, [32, 64]), self.x, ROWS=32)
            (launch,) = launches
        assert (launch.kernel, launch.grid, launch.threads) == ("add_kernel", (3, 2, 1), 128)
        assert launch.shared_bytes >= self.x.nbytes

    def test_descriptor_without_rows(self) -> None:
        descriptor = TensorDescriptor.from_tensor(self.x, [32, 64])
        descriptor.shape = [0, 64]  # Triton's own check has passed
        with fake_gpu(), pytest.raises(RuntimeError, match="a size of 0"):
            add_kernel[(1,)](descriptor, self.x, ROWS=32)

    def test_descriptor_of_an_odd_address(self) -> None:
        descriptor = TensorDescriptor.from_tensor(self.x, [32, 64])
        descriptor.base = self.x[:, 1:]
        with fake_gpu(), pytest.raises(RuntimeError, match="isn't a multiple of 16 bytes"):
            add_kernel[(1,)](descriptor, self.x, ROWS=32)

    def test_grid_beyond_the_limits(self) -> None:
        with fake_gpu(), pytest.raises(RuntimeError, match="a grid beyond the limits"):
            add_kernel[(1, 70000)](TensorDescriptor.from_tensor(self.x, [32, 64]), self.x, ROWS=32)

    def test_unknown_argument(self) -> None:
        with fake_gpu(), pytest.raises(KeyError, match="unknown"):
            add_kernel[(1,)](TensorDescriptor.from_tensor(self.x, [32, 64]), self.x, ROWS=32, unknown=1)
