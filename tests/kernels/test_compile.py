"""Compiles every kernel configuration of the package for its architecture, without the hardware."""

import pytest
import torch
from _pytest.mark import ParameterSet

pytest.importorskip("triton")

from tests.kernels import sass
from tests.kernels.aot import (
    FEATURES,
    Configuration,
    HopperConfiguration,
    compile_configuration,
    disassemble,
    hopper_configurations,
    shipped_configurations,
)
from tritonpack.kernels.tile_shapes import FLOAT32_TILES, Kernel, key_gradient_kernels

pytestmark = pytest.mark.compile

# The limits of a program: registers per thread, and shared memory (of the smallest GPU that uses the row).
LIMITS = {"sm_80": (255, 99), "sm_90": (255, 227), "sm_100": (255, 227), "sm_120": (255, 99), "gfx942": (512, 64)}


# At head dimension 512 the addresses of 32 products per block spill (docs/decisions/kernel-forms.md), in each of two or
# four loops. With some features values from outside of the loops spill, too.
KNOWN_SPILLS = {
    "dk-sm_100-d512-bf16": 250,
    "dq-sm_100-d512-bf16": 600,
    "forward-sm_90-d512-bf16-tree": 4,
    "dk-sm_100-d512-bf16-tree": 250,
    "dv-sm_100-d512-bf16-tree": 64,
    "dq-sm_100-d512-bf16-tree": 600,
    "dk-sm_120-d256-bf16": 28,
    "dk-sm_120-d512-bf16": 1400,
    "dk-sm_120-d256-bf16-tree": 60,
    "dk-sm_120-d512-bf16-tree": 1400,
    "dq-sm_90-d64-bf16-dropout": 3,
    "dq-sm_90-d128-bf16-dropout": 3,
}


# float32 has the same tiles on every architecture; they are compiled for sm_80, where they fit.
FLOAT32 = [
    Configuration(kernel, "sm_80", head_dim, torch.float32)
    for head_dim in FLOAT32_TILES
    for kernel in ("forward", *key_gradient_kernels(head_dim, torch.float32, "sm_80"), "dq")
]


def _param(configuration: Configuration | HopperConfiguration, quick: bool) -> ParameterSet:
    return pytest.param(configuration, id=str(configuration), marks=() if quick else pytest.mark.slow)


def _is_quick(configuration: Configuration) -> bool:
    """Whether a configuration is compiled in every run: Hopper in 16 bits, one size of trees, two kernels for sm_120.

    Others take minutes.
    """
    if configuration.arch == "sm_120":
        return str(configuration) in ("dkdv-sm_120-d128-bf16", "dq-sm_120-d128-bf16")
    if configuration.features == ("tree",):
        return str(configuration).endswith("sm_90-d128-bf16-tree")
    return configuration.arch == "sm_90" and not configuration.features and configuration.dtype != torch.float32


@pytest.mark.parametrize("configuration", [_param(c, _is_quick(c)) for c in shipped_configurations() + FLOAT32])
def test_shipped_configuration(configuration: Configuration) -> None:
    resources = compile_configuration(configuration)
    registers, shared_kib = LIMITS[configuration.arch]
    if configuration.dtype == torch.float32 and configuration.head_dim == 512:
        shared_kib = 163  # of an A100; the row's smallest GPUs have less
    assert resources.registers <= registers
    assert resources.shared_bytes <= shared_kib * 1024
    assert resources.instructions > 100  # a kernel may compile to a single trap, without an error
    if configuration.dtype != torch.float32:  # float32 products use ordinary instructions
        assert resources.spills <= KNOWN_SPILLS.get(str(configuration), 0)
        assert resources.matrix_instructions > 0


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("gpu", "arch"), [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_103", "sm_100")])
@pytest.mark.sampled("sm_89-sm_80-128-dkdv")
def test_other_nvidia_gpus(gpu: str, arch: str, head_dim: int, kernel: Kernel) -> None:
    """They use the tiles of the architecture before them."""
    resources = compile_configuration(Configuration(kernel, arch, head_dim, torch.bfloat16), gpu)
    assert resources.spills == 0
    assert resources.matrix_instructions > 0
    assert resources.shared_bytes <= LIMITS[arch][1] * 1024


@pytest.mark.parametrize("features", [FEATURES, *((feature,) for feature in FEATURES)], ids="-".join)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.slow
def test_features_on_consumer_blackwell(kernel: Kernel, head_dim: int, features: tuple[str, ...]) -> None:
    """It has no tiles of its own for features."""
    resources = compile_configuration(Configuration(kernel, "sm_120", head_dim, torch.bfloat16, features=features))
    assert resources.spills == 0
    assert resources.matrix_instructions > 0
    assert resources.shared_bytes <= LIMITS["sm_120"][1] * 1024


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("gpu", ["gfx90a", "gfx950", "gfx1100", "gfx1201"])
@pytest.mark.sampled("gfx950-dkdv")
def test_other_amd_gpus(gpu: str, kernel: Kernel) -> None:
    """They use gfx942's tiles. On RDNA (gfx11, gfx12), with half the registers, the kernels compile and spill."""
    resources = compile_configuration(Configuration(kernel, "gfx942", 128, torch.bfloat16), gpu)
    assert resources.instructions > 100
    assert resources.shared_bytes <= 64 * 1024
    if gpu.startswith("gfx9"):
        assert resources.spills == 0
        assert resources.matrix_instructions > 0


@pytest.mark.parametrize("configuration", [_param(c, str(c).endswith("d128-bf16")) for c in hopper_configurations()])
def test_hopper_kernel(configuration: HopperConfiguration) -> None:
    """TMA loads, more registers for the computing warps, a softmax between a product's request and its wait."""
    resources, listing = disassemble(configuration)
    assert resources.shared_bytes <= 227 * 1024
    assert "UTMALDG" in listing
    assert "USETMAXREG" in listing
    code = sass.parse(listing)
    loops = [code.instructions[loop.start : loop.stop] for loop in sass.loops(code)]
    assert len(loops) == 6  # three phases in each half
    for loop in loops:
        events = sass.events(loop)
        requested, overlapped, after = events.split("|")  # one product at a time would need more waits
        assert requested.count("H") == events.count("H")
        assert overlapped.count("e") >= configuration.tile.block_n // 2
        assert "e" not in requested + after
        # Only addresses may spill here; other spills are in the loading warp, which has 24 registers.
        assert sum(instruction.stem in ("LDL", "STL") for instruction in loop) <= 3
