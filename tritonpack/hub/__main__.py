"""`python -m tritonpack.hub` prints the folder that the `kernels` library takes for a kernel."""

from pathlib import Path

print(Path(__file__).parent)
