"""Prints the facts of a machine with a GPU: `python3 -m benchmarks.gpu.machine [ceilings]`.

Prints the device and the versions, or the rates of a copy and of a matrix product, which no kernel exceeds.
"""

from __future__ import annotations

import argparse
import os
import shutil

import torch

from benchmarks.harness.ledger import environment
from benchmarks.harness.measure import quantiles, time_alternating
from benchmarks.harness.registry import Call


def ceilings() -> tuple[float, float]:
    """The limits of this GPU: TB/s of a device-to-device copy, and TFLOP/s of a bf16 matrix product."""
    x, y = (torch.empty(2**31, dtype=torch.int8, device="cuda") for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls = {"copy": Call(lambda: y.copy_(x)), "matmul": Call(lambda: a @ b)}
    times = time_alternating(calls, torch.device("cuda"))
    copy, matmul = (quantiles(times[name].device)[1] for name in ("copy", "matmul"))
    return 2 * x.numel() / copy / 1e9, 2 * 8192**3 / matmul / 1e9


def facts(device: torch.device) -> dict[str, object]:
    """The device, the versions and the tools."""
    found: dict[str, object] = {name: value for name, value in environment(device).items() if value}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        found["memory"] = f"{about.total_memory / 2**30:.0f} GiB"
        found["multiprocessors"] = about.multi_processor_count
    found["cores"] = os.cpu_count()
    found["compute-sanitizer"] = shutil.which("compute-sanitizer") or "absent"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("facts", "ceilings"), nargs="?", default="facts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu.machine needs a GPU, and torch sees none here.")
    if options.what == "ceilings":
        print("copy {:.2f} TB/s, bf16 matrix product {:.0f} TFLOP/s".format(*ceilings()))
        return
    device = torch.device(options.device)
    for name, value in facts(device).items():
        print(f"{name:36} {value}")
    x = torch.randn(512, 512, device=device)
    assert torch.allclose(x @ torch.eye(512, device=device), x)
    print("The device computes.")


if __name__ == "__main__":
    main()
