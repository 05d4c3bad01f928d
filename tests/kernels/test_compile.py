"""Every kernel configuration that the package ships, compiled for its architecture without the hardware."""

import pytest
import torch

pytest.importorskip("triton")

from tritonpack.kernels.aot import Configuration, compile_configuration, shipped_configurations

pytestmark = pytest.mark.compile

# What a program may take: registers per thread, shared memory per program (the smallest GPU served by the row).
LIMITS = {"sm_80": (255, 99), "sm_90": (255, 227), "sm_100": (255, 227), "gfx942": (512, 64)}


@pytest.mark.parametrize("configuration", shipped_configurations(), ids=str)
def test_shipped_configuration(configuration: Configuration) -> None:
    resources = compile_configuration(configuration)
    registers, shared_kib = LIMITS[configuration.arch]
    assert resources.registers <= registers
    assert resources.shared_bytes <= shared_kib * 1024
    assert resources.instructions > 100  # a kernel may compile to a single trap, without an error
    if configuration.dtype != torch.float32:  # which is multiplied exactly, by ordinary instructions, where it must
        assert resources.spills == 0
        assert resources.matrix_instructions > 0 or configuration.kernel == "row_statistics"
