"""Search for the fastest tiles on this machine's GPU, and write a file that `tritonpack.load_tiles` reads.

    python -m benchmarks.tune --out tiles.json [--head-dims 64 128] [--kernels forward dq] [--tokens 32768]

The package never tunes by itself, because lengths change with every step, and a search would stop the training. The
candidates are the legal tiles of each kernel. Each is timed by device events on a packed batch of documents like the
standard library's functions. At the end the results of the chosen tiles are compared with the reference.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
from tqdm import tqdm

from tests.lengths import distributions
from tritonpack import BlockDiagonalMask
from tritonpack.backends import triton as triton_backend
from tritonpack.kernels import tile_shapes as tiles
from tritonpack.kernels.tile_shapes import Kernel, TileShape
from tritonpack.options import make_options
from tritonpack.testing import Case, check_backend, make_inputs

# Kernel, tile, padded head dimension -> milliseconds, or None if the tile doesn't run.
Measure = Callable[[Kernel, TileShape, int], float | None]


def candidates(kernel: Kernel, block_d: int, arch: str) -> Iterator[TileShape]:
    """All legal tiles in the sizes that are worth a trial."""
    sizes, columns = (16, 32, 64, 128), (128, 256) if block_d == 512 else (256,)
    heads = {"forward": (1, 8), "dq": (1, 4)}.get(kernel, (1,))
    for m, n, warps, stages, width, together in itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4), columns, heads):
        for deferred in (False, True) if kernel == "forward" else (False,):
            tile = TileShape(m, n, warps, stages, width, together, deferred)
            if 512 <= m * n <= 128 * 128 and not tiles.why_illegal(kernel, tile, block_d, arch):
                yield tile


def tune(kernel: Kernel, block_d: int, arch: str, measure: Measure, *, block_n: int | None = None) -> TileShape:
    """The fastest of the candidates and the shipped tile; `block_n` restricts them to tiles of that many keys."""
    shipped = tiles.select_tile(kernel, block_d, torch.bfloat16, arch)
    choice = [shipped, *(t for t in candidates(kernel, block_d, arch) if t != shipped)]
    if block_n is not None:
        choice = [tile for tile in choice if tile.block_n == block_n]
    best, fastest = shipped, float("inf")
    for tile in tqdm(choice, desc=f"{kernel} {block_d}", unit="tile", leave=False):
        time = measure(kernel, tile, block_d)
        if time is not None and time < fastest:
            best, fastest = tile, time
    return best


class DeviceTimer:
    """Times the forward or the backward pass with another tile for one kernel."""

    def __init__(self, tokens: int, arch: str) -> None:
        self.lengths = distributions(tokens)["stdlib"]
        self.arch = arch

    def __call__(self, kernel: Kernel, tile: TileShape, block_d: int) -> float | None:
        """The median time in milliseconds; None if the tile can't be launched."""
        before = dict(tiles._loaded)
        tiles._loaded[self.arch, kernel, block_d] = tile
        try:
            return self._time(kernel, block_d)
        except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError):
            return None
        finally:
            tiles._loaded.clear()
            tiles._loaded.update(before)

    def _time(self, kernel: Kernel, head_dim: int) -> float:
        total = sum(self.lengths)
        q, dout = (torch.randn(total, 16, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(total, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        mask = BlockDiagonalMask.from_seqlens(self.lengths, device="cuda")
        options = make_options(q, mask)
        plan = triton_backend.plan_tiles(q, k, v, mask, options, backward=True)
        out, lse = triton_backend.forward(q, k, v, mask, options, plan)

        def run() -> None:
            if kernel == "forward":
                triton_backend.forward(q, k, v, mask, options, plan)
            else:
                triton_backend.backward(dout, None, q, k, v, out, lse, mask, options, plan)

        with torch.no_grad():
            return float(triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], choices=(64, 128, 256, 512))
    parser.add_argument("--kernels", nargs="+", default=["forward", "dkdv", "dk", "dv", "dq"])
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are tuned on the GPU that they are for; there is none here.")
    arch = tiles.current_arch(torch.device("cuda", torch.cuda.current_device()))
    timer = DeviceTimer(options.tokens, arch)
    best: dict[tuple[str, Kernel, int], TileShape] = {}
    for head_dim in options.head_dims:
        offered = ("forward", *tiles.key_gradient_kernels(head_dim, torch.bfloat16, arch), "dq")
        for kernel in (name for name in offered if name in options.kernels):
            fixed = best.get((arch, "dk", head_dim)) if kernel == "dv" else None
            tile = tune(kernel, head_dim, arch, timer, block_n=None if fixed is None else fixed.block_n)
            best[arch, kernel, head_dim] = tile
            shipped = tiles.select_tile(kernel, head_dim, torch.bfloat16, arch)
            times = [timer(kernel, t, head_dim) for t in (tile, shipped)]
            print(f"{kernel} {head_dim}: {tile} {times[0]} ms; shipped {times[1]} ms", flush=True)
    tiles.save_tiles(options.out, best, device=torch.cuda.get_device_name(), triton=triton.__version__)
    print(f"{tiles.load_tiles(options.out)} tiles in {options.out}")
    for head_dim in options.head_dims:
        case = Case("tuned", (300, 1, 0, 77, 500), heads=8, kv_heads=2, head_dim=head_dim, slack=9)
        print(f"head dimension {head_dim}: {check_backend(make_inputs(case, torch.bfloat16, 'cuda'), 'triton')}")


if __name__ == "__main__":
    main()
