"""Print the largest errors of each backend and of plain attention against float64 in the same dtype.

    python -m benchmarks.exactness            # reference and blocked; on a GPU triton too
    TRITON_INTERPRET=1 python -m benchmarks.exactness   # triton in its interpreter as well

Each figure is the largest over all cases of tritonpack.testing, relative to the largest value of the output.
"""

from __future__ import annotations

import os

import torch

from tritonpack.testing import CASES, check_backend, make_inputs
from tritonpack.testing.tolerance import OUTPUTS, run


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ["reference", "blocked"]
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        backends.append("triton")
    print(f"{'dtype':9} {'computed by':12}" + "".join(f"{name:>10}" for name in OUTPUTS))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        worst: dict[str, dict[str, float]] = {name: dict.fromkeys(OUTPUTS, 0.0) for name in ("plain", *backends)}
        for case in CASES:
            inputs = make_inputs(case, dtype, device)
            sizes = {name: float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
                     for name, x in run(make_inputs(case, torch.float64, device), "reference").items()}  # fmt: skip
            for backend in backends:
                errors = check_backend(inputs, backend)
                for name in errors.backend:
                    size = sizes[name] or 1.0
                    worst[backend][name] = max(worst[backend][name], errors.backend[name] / size)
                    worst["plain"][name] = max(worst["plain"][name], errors.plain[name] / size)
        for computed_by, row in worst.items():
            figures = "".join(f"{row[name]:10.1e}" for name in OUTPUTS)
            print(f"{str(dtype).removeprefix('torch.'):9} {computed_by:12}{figures}", flush=True)


if __name__ == "__main__":
    main()
