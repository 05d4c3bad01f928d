"""Forward and backward of every peer, timed by device events after the same shapes were found correct.

    python3 -m benchmarks.gpu --out DIR [--part 0] [--parts 1] [--tokens 16384 32768] [--lengths FILE.json]

Rows are appended to DIR/attention.csv as they come, so that an interrupted run keeps what it measured.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.peers import PEERS, Batch, Forward
from benchmarks.lengths import distributions, visible_pairs
from tritonpack import BlockDiagonalMask
from tritonpack.testing import Inputs, check_outputs

REPEATS = 20


def make_batch(
    lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = sum(lengths)

    def draw(count: int) -> Tensor:
        return torch.randn(tokens, count, head_dim, device="cuda", dtype=dtype, generator=generator)

    q, k, v = (draw(n).requires_grad_() for n in (heads, kv_heads, kv_heads))
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    mask = BlockDiagonalMask.from_cu_seqlens(cu_seqlens, total_q=tokens)
    return Batch(q, k, v, draw(heads), tuple(lengths), cu_seqlens, mask)


def verify(batch: Batch, forward: Forward) -> None:
    """Compare the longest, the median and the shortest document, on one key head and its query heads, with float64."""
    out = forward()
    dq, dk, dv = torch.autograd.grad(out, (batch.q, batch.k, batch.v), batch.dout)
    group = batch.q.shape[1] // batch.k.shape[1]
    kv_head = batch.k.shape[1] - 1
    heads = slice(kv_head * group, (kv_head + 1) * group)
    order = sorted(range(len(batch.lengths)), key=lambda i: -batch.lengths[i])
    for document in {order[0], order[len(order) // 2], order[-1]}:
        begin = sum(batch.lengths[:document])
        rows, length = slice(begin, begin + batch.lengths[document]), batch.lengths[document]
        for head in range(heads.start, heads.stop) if length > 4096 else [None]:
            picked = heads if head is None else slice(head, head + 1)
            inputs = Inputs(
                batch.q[rows, picked].detach(), batch.k[rows, kv_head:].detach(), batch.v[rows, kv_head:].detach(),
                batch.dout[rows, picked], torch.zeros(picked.stop - picked.start, length, device="cuda"),
                BlockDiagonalMask.from_seqlens([length], device="cuda"),
            )  # fmt: skip
            got = {"out": out[rows, picked].detach(), "dq": dq[rows, picked]}
            if head is None:  # the key gradients sum over the whole group
                got |= {"dk": dk[rows, kv_head:], "dv": dv[rows, kv_head:]}
            check_outputs(inputs, got)


def time_alternating(calls: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Milliseconds of every call by device events, one after the other in turn; a cold L2 before each."""
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            cache.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return times


def measure(batch: Batch, shape: dict[str, object], write: Callable[[dict[str, object]], None]) -> None:
    forwards: dict[str, Forward] = {}
    for name, prepare in PEERS.items():
        try:
            forward = prepare(batch)
            verify(batch, forward)
        except Exception as error:  # a peer may fail in any way; the row says how
            torch.cuda.empty_cache()
            write(
                {**shape, "implementation": name, "status": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}
            )
            continue
        forwards[name] = forward
    heads, head_dim = batch.q.shape[1:]
    flops = 4 * heads * head_dim * visible_pairs(list(batch.lengths))
    tensors = (batch.q, batch.k, batch.v)
    outputs = {name: forward() for name, forward in forwards.items()}
    backwards = {
        name: (lambda out=out: torch.autograd.grad(out, tensors, batch.dout, retain_graph=True))
        for name, out in outputs.items()
    }
    for op, calls, factor in (("forward", forwards, 1.0), ("backward", backwards, 2.5)):
        peaks = {name: _peak(call) for name, call in calls.items()}
        for name, times in time_alternating(dict(calls)).items():
            p20, p50, p80 = torch.tensor(times).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
            write({
                **shape, "op": op, "implementation": name, "status": "ok",
                "p20_ms": round(p20, 4), "p50_ms": round(p50, 4),
                "p80_ms": round(p80, 4), "tflops": round(factor * flops / p50 / 1e9, 1), "extra_mib": round(peaks[name]
                / 2**20, 1),
            })  # fmt: skip


def _peak(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


COLUMNS = (
    "op", "implementation", "distribution", "documents", "tokens", "heads", "kv_heads", "head_dim", "dtype", "status",
    "p20_ms", "p50_ms", "p80_ms", "tflops", "extra_mib", "device", "driver", "torch", "triton", "tritonpack", "commit",
)  # fmt: skip


def environment() -> dict[str, object]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown"

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "source"

    return {
        "device": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "tritonpack": installed("tritonpack"),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
    }


def ceilings() -> str:
    """This machine's own limits: a device-to-device copy and a bf16 matrix product."""
    x, y = (torch.empty(2**31, dtype=torch.int8, device="cuda") for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = time_alternating({"copy": lambda: y.copy_(x), "matmul": lambda: a @ b})
    copy, matmul = (sorted(times[name])[REPEATS // 2] for name in ("copy", "matmul"))
    return f"copy {2 * x.numel() / copy / 1e9:.2f} TB/s, bf16 matrix product {2 * 8192**3 / matmul / 1e9:.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the CSV")
    parser.add_argument("--part", type=int, default=0, help="which part of the list to measure, from 0")
    parser.add_argument("--parts", type=int, default=1, help="how many parts the list is cut into")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--lengths", type=Path, help="a JSON list of document lengths to measure as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a GPU, and torch sees none here.")
    options.out.mkdir(parents=True, exist_ok=True)
    path, about = options.out / "attention.csv", environment()
    print(
        f"{about['device']}, driver {about['driver']}, torch {about['torch']}, triton {about['triton']}; {ceilings()}",
        flush=True,
    )
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if fresh:
            writer.writeheader()

        def write(row: dict[str, object]) -> None:
            writer.writerow({**row, **about})
            file.flush()
            print("  ".join(str(row.get(c, "")) for c in COLUMNS[:15]), flush=True)

        shapes = list(itertools.product((128, 64, 256), options.tokens))
        for head_dim, tokens in shapes[options.part :: options.parts]:
            for name, lengths in distributions(tokens, options.lengths).items():
                heads, kv_heads = 4096 // head_dim, 1024 // head_dim
                batch = make_batch(lengths, heads, kv_heads, head_dim, torch.bfloat16)
                shape = {
                    "distribution": name, "documents": len(lengths), "tokens": tokens, "heads": heads, "kv_heads":
                    kv_heads, "head_dim": head_dim, "dtype": "bfloat16",
                }  # fmt: skip
                measure(batch, shape, write)


if __name__ == "__main__":
    main()
