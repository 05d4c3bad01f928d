"""Every kernel that can be launched, and what is wrong with its binary.

A kernel's binary depends on the GPU, the padded head dimensions, the dtype, the query heads per key head and the
features in use. Binaries that resemble others are left out. Head dimensions 16 and 32, float16, and 192 with 128 have
plain softmax alone, and float32, whose tiles are the same everywhere, has one head dimension except on sm_80. Features
with trees have the head dimensions of their models.

Of AMD GPUs less is compiled: plain attention in bfloat16 at 64 and 128, also with storages of more than 2 GiB, and of
GPUs with tiles of their own also plain attention at 256 and 512, single features at 64 and 128 (on gfx1201 at 64
alone), and, except on gfx1201, float32 at 128.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from tests.kernels.aot import TARGETS, USES_TILES_OF, Configuration, Resources, hopper_configurations
from tritonpack.kernels.tile_shapes import TILES, Kernel, key_gradient_kernels

KERNELS = Path(__file__).parents[2] / "tritonpack" / "kernels"

# Shared memory that a program can have, in KiB.
SHARED_KIB = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "gfx908": 64, "gfx90a": 64, "gfx942": 64, "gfx950": 160, "gfx1100": 64, "gfx1151": 64, "gfx1200": 64, "gfx1201": 64,
}  # fmt: skip

# Features that run together, with the query heads per key head of models that have them, and head dimensions. Without
# features there are 4 (Llama 3) or 1.
FEATURE_SETS: dict[tuple[str, ...], tuple[int, tuple[int, ...]]] = {
    ("softcap",): (2, (64, 128, 256)),  # Gemma 2
    ("sinks",): (8, (64, 128, 256)),  # gpt-oss
    ("alibi",): (1, (64, 128, 256)),  # BLOOM, MPT
    ("dropout",): (1, (64, 128, 256)),  # GPT-2, BERT
    ("dlse",): (4, (64, 128, 256)),  # partial results that are merged
    ("tree",): (4, (64, 128, 256)),
    ("softcap", "tree"): (2, (128, 256)),
    ("sinks", "tree"): (8, (64,)),
    ("alibi", "tree"): (1, (128,)),
}


class Finding(NamedTuple):
    """What is wrong with a binary. `is_minor`: it costs little, because it isn't in a loop."""

    text: str
    is_minor: bool = False


def findings(configuration: Configuration, resources: Resources | str) -> list[Finding]:
    """What is wrong with a compiled kernel, or with one that doesn't compile (then `resources` is the message)."""
    if isinstance(resources, str):
        return [Finding("doesn't compile")]
    found = []
    if resources.instructions < 100:  # a kernel may compile to a single trap, without an error
        found.append(Finding("no code"))
    elif configuration.dtype != torch.float32 and not resources.matrix_instructions:
        found.append(Finding("no matrix instructions"))  # float32 is multiplied exactly, by ordinary instructions
    elif not resources.loops:
        found.append(Finding("no loop that multiplies"))
    limit = SHARED_KIB[configuration.gpu]
    if resources.shared_bytes > limit * 1024:
        found.append(Finding(f"{resources.shared_bytes / 1024:.0f} of {limit} KiB"))
    if inside := resources.spills_in_loops:
        found.append(Finding(f"{inside} spills in loops"))
    if outside := resources.spills - inside:
        found.append(Finding(f"{outside} spills outside", is_minor=True))
    return found


def launchable() -> list[Configuration]:
    """Every configuration, by GPU."""
    configurations: list[Configuration] = []
    for gpu in SHARED_KIB:
        configurations += _of_gpu(gpu)
        configurations += [c for c in hopper_configurations() if c.gpu == gpu]
    return configurations


def _of_gpu(gpu: str) -> Iterator[Configuration]:
    bf16 = torch.bfloat16
    if TARGETS[gpu].backend == "hip":
        yield from _of_amd_gpu(gpu)
        return
    for head_dim in (64, 128, 256):
        yield from _kernels(gpu, head_dim, bf16)
        yield from _kernels(gpu, head_dim, bf16, group=1)
        for features, (group, head_dims) in FEATURE_SETS.items():
            if head_dim in head_dims:
                yield from _kernels(gpu, head_dim, bf16, group=group, features=features)
        yield from _kernels(gpu, head_dim, torch.float16)
    for head_dim in (16, 32, 512):
        yield from _kernels(gpu, head_dim, bf16)
    yield from _kernels(gpu, 512, bf16, features=("tree",))
    yield from _kernels(gpu, 192, bf16, 128)
    for head_dim in (64, 128, 256, 512) if gpu in ("sm_80", "sm_86", "sm_89") else (128,):
        yield from _kernels(gpu, head_dim, torch.float32)


def _of_amd_gpu(gpu: str) -> Iterator[Configuration]:
    bf16 = torch.bfloat16
    for head_dim in (64, 128):
        yield from _kernels(gpu, head_dim, bf16)
        yield from _kernels(gpu, head_dim, bf16, large=True)
    if gpu in TILES:
        for head_dim in (256, 512):
            yield from _kernels(gpu, head_dim, bf16)
        for head_dim in (64, 128) if gpu != "gfx1201" else (64,):
            for features, (group, _) in FEATURE_SETS.items():
                if len(features) == 1:
                    yield from _kernels(gpu, head_dim, bf16, group=group, features=features)
        if gpu != "gfx1201":
            yield from _kernels(gpu, 128, torch.float32)


def _kernels(
    gpu: str, head_dim: int, dtype: torch.dtype, head_dim_v: int | None = None, *, group: int = 4,
    features: tuple[str, ...] = (), large: bool = False,
) -> Iterator[Configuration]:  # fmt: skip
    """The kernels of forward and backward; not those that the features don't change."""
    arch, row = USES_TILES_OF.get(gpu, gpu), triton.next_power_of_2(head_dim)
    kernels: tuple[Kernel, ...] = ("forward", *key_gradient_kernels(row, dtype, arch), "dq")
    for kernel in kernels:
        if "dlse" in features and kernel != "dq":
            continue  # it alone reads the gradient of the log-sum-exp
        if "sinks" in features and kernel not in ("forward", "dq"):
            continue  # the others read sinks as a part of the log-sum-exp
        yield Configuration(kernel, gpu, head_dim, dtype, head_dim_v, group, features, large)


def key(configuration: Configuration) -> str:
    """A digest of the kernel's code, without comments, and of the configuration. The tile isn't part of it."""
    name = str(configuration)
    if configuration.backend == "gluon":
        modules = sorted(path.stem for path in KERNELS.glob("hopper*.py"))
    else:
        modules = ["forward" if configuration.kernel == "forward" else "backward"]
        if TARGETS[configuration.gpu].backend == "hip" and not configuration.large:
            name += " DS"  # Triton knows that 32 bits hold every offset
    return hashlib.sha256("\n".join([*map(_code, modules), name]).encode()).hexdigest()[:12]


@cache
def _code(module: str) -> str:
    """A module of kernels and those that it imports, without docstrings and comments."""
    tree = ast.parse((KERNELS / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    text = ast.unparse(tree)
    imported = set(re.findall(r"from tritonpack\.kernels\.(\w+) import", text)) - {"tile_shapes"}
    return "\n".join([text, *map(_code, sorted(imported))])
