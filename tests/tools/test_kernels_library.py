"""The `kernels` library loads the repository, with a transformers that takes a release of it that registries have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASES = ("kernels==0.17.2", "transformers==5.20.0")


@pytest.mark.slow
def test_kernels_loads_the_repository() -> None:
    """The tests that skip without the library run in an environment that has it."""
    folder = ROOT / ".matrix" / RELEASES[0]
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(folder)]
    if not (folder / ".installed").exists():
        subprocess.run([*install, "--no-deps", *RELEASES], check=True)
        subprocess.run([*install, "sigstore>=4,<5", "tomlkit"], check=True)  # what kernels requires and we don't have
        (folder / ".installed").touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/tools/test_hub_build.py",
               "-k", "with_kernels or KernelsLibrary"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
