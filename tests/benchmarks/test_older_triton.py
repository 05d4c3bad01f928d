"""The kernels as Triton 3.6 compiles them, the release on many GPU machines, in an environment of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.compile_matrix import VERSIONS, installed
from tests.virtual_gpu.conftest import NEEDS
from tests.virtual_gpu.device import virtual_gpu
from tests.virtual_gpu.test_attention import SHORT
from tritonpack.testing import CASES, check_backend, make_inputs

pytestmark = [*NEEDS, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
OLDER = VERSIONS[0]
NAMES = {
    ("sm_80", "triton"): {"causal", "short-everything"},
    ("sm_90", "triton"): {"short-ordinary", "short-everything"},
    ("sm_90", "gluon"): {"short-ordinary"},
}


@pytest.mark.parametrize(("arch", "backend"), NAMES, ids=["-".join(kernels) for kernels in NAMES])
def test_cases(arch: str, backend: str) -> None:
    """Forward and backward, each in a process whose Triton is 3.6, with a cache of its own."""
    try:
        folder = installed(OLDER)
    except subprocess.CalledProcessError:
        pytest.skip(f"Triton {OLDER} can't be downloaded here")
    paths = os.pathsep.join((str(folder), str(ROOT)))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": f"{folder}-cache", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, arch, backend], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(done.stdout.split()) == {OLDER} | NAMES[arch, backend]


def with_fences(_: str, ptx: str) -> str:
    """Add a proxy fence after the end of each mbarrier, whose memory TMA may write next, as Triton 3.9 does."""
    return re.sub(r"mbarrier\.inval[^;]*;", r"\g<0> fence.proxy.async.shared::cta;", ptx)


def main(arch: str, backend: str) -> None:
    """Print the version of Triton, and the name of each case that is right."""
    import triton

    print(triton.__version__)
    for case in (*SHORT, *CASES):
        if case.name in NAMES[arch, backend]:
            with virtual_gpu(arch, rewrite=with_fences if backend == "triton" else None):
                check_backend(make_inputs(case, torch.bfloat16, slack_value=float("nan")), backend)
            print(case.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
