"""Calls that launch every Triton kernel of the package with the launchers' arguments, in all their specialisations.

Each call has two parts: the tensors and masks, and the launches. `tests/kernels/test_launches.py` launches without a
GPU. `benchmarks/gpu/compile_ahead.py` compiles on a machine with one, in parallel, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests import invariance
from tests.gpu.cases import HOPPER_HEAD_DIMS, LARGE
from tritonpack import BlockDiagonalMask
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.backends.tree_table import tree_tables
from tritonpack.kernels import intervals, trees
from tritonpack.kernels.hopper_dq import HOPPER_DQ_TILES
from tritonpack.masks.forms import dense
from tritonpack.testing import CASES, Case, Inputs, make_inputs
from tritonpack.testing.cases import parents_of
from tritonpack.testing.tolerance import run

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Call:
    """A call that launches kernels."""

    name: str
    prepare: Callable[[str], Any]  # makes the tensors and masks on a device; they have values
    launch: Callable[[Any], object]  # launches kernels for them
    kernels: frozenset[str]  # the names of some that it launches

    def __str__(self) -> str:
        return self.name

    @property
    def for_hopper(self) -> bool:
        """Whether only a Hopper GPU has its kernels."""
        return any(kernel.startswith("hopper_") for kernel in self.kernels)


def calls() -> list[Call]:
    """All calls; of the cases that differ in lengths and masks alone, and so share their kernels, the first."""
    invariant = {"pack_invariant": True}
    cases: list[tuple[str, Case, dict[str, Any], str]] = [
        *(("large-", case, {}, dtype) for case in LARGE for dtype in DTYPES),
        *(("", case, {}, dtype) for case in CASES for dtype in DTYPES),
        *(("pack-invariant-", case, invariant, dtype) for case in invariance.CASES for dtype in ("bf16", "fp16")),
    ]
    # Dimensions of size 1, whose strides torch leaves open.
    one_token = Case("one-token", (1,), heads=1, kv_heads=1, head_dim=128)
    found: dict[Any, Call] = {}
    for prefix, case, keywords, dtype in (*cases, ("", one_token, {}, "bf16")):
        features = (bool(case.softcap), case.sinks, case.alibi, bool(case.dropout_p), bool(case.parents), *keywords)
        sizes = (case.heads, case.kv_heads, case.head_dim, case.head_dim_v, case is one_token)
        found.setdefault((dtype, sizes, features), attention(f"{prefix}{case}-{dtype}", case, dtype, keywords))
    return [*found.values(), *hopper_calls(), *mask_calls()]


def attention(name: str, case: Case, dtype: str, keywords: dict[str, Any]) -> Call:
    """Forward and backward of the backend "triton"."""

    def prepare(device: str) -> Inputs:
        inputs = make_inputs(case, DTYPES[dtype], device)
        if keywords:
            inputs.mask.transpose()  # whole documents are read from it, so it must have values
        return replace(inputs, keywords=inputs.keywords | keywords)

    kernels = frozenset({"forward_kernel", "dq_kernel", "dkdv_kernel"})
    return Call(name, prepare, partial(run, backend="triton"), kernels)


def hopper_calls() -> list[Call]:
    """Forward and backward of the backend "gluon"."""
    return [
        hopper_attention(f"gluon-{head_dim}-{dtype}", replace(LARGE[1], head_dim=head_dim), dtype)
        for head_dim in HOPPER_HEAD_DIMS
        for dtype in ("bf16", "fp16")
    ]


def hopper_attention(name: str, case: Case, dtype: str) -> Call:
    """Forward and backward of the backend "gluon"."""
    gradients = ("hopper_dq_kernel", "hopper_dkdv_kernel") if case.head_dim in HOPPER_DQ_TILES else ("dq_kernel",)
    kernels = frozenset({"hopper_forward_kernel", *gradients})
    return Call(name, partial(make_inputs, case, DTYPES[dtype]), partial(run, backend="gluon"), kernels)


def mask_calls() -> list[Call]:
    """The kernels that build masks and tables, and write masks out."""
    lengths, forest = [300, 20, 1, 700], [[(-1, 512), (0, 33), (0, 300)], [(-1, 16), (0, 1)]]

    def offsets(dtype: torch.dtype, device: str) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)

    def positions(device: str) -> Tensor:
        return torch.cat([torch.arange(n) for n in lengths])[None].to(device)

    def mask(device: str) -> BlockDiagonalMask:
        return BlockDiagonalMask.from_seqlens(lengths, device=device)

    def tree(device: str) -> BlockDiagonalMask:
        parents = torch.tensor(parents_of(*forest), device=device)
        return replace(BlockDiagonalMask.from_tree(parents), trusted=True)  # a copy that came from no other device

    def transposed(device: str) -> BlockDiagonalMask:
        made = mask(device)
        made.transpose()  # which is kept, so that its kernel isn't launched
        return made

    everything = 2**31 - 1
    reach = (everything, 0, everything)
    cuts = (Cut(32, 64, 128), Cut(128, of_keys=True))
    of_tree = (Cut(32, 64, 128), Cut(128, 64, 128, of_keys=True))
    found: list[tuple[str, Callable[[str], Any], Callable[[Any], object], str]] = [
        *((f"offsets-{str(dtype).removeprefix('torch.')}", partial(offsets, dtype),
           lambda cu: intervals.intervals_of_offsets(cu, cu, sum(lengths), sum(lengths), *reach), "offsets_kernel")
          for dtype in (torch.int32, torch.int64)),
        *((f"ids-{rule}", positions, partial(_intervals, rule, reach), "runs_kernel")
          for rule in ("positions", "segments", "padding")),
        ("ids-codes", lambda device: positions(device).clamp(max=2).to(torch.uint8),
         partial(_intervals, "codes", reach), "runs_kernel"),
        ("transpose", mask, partial(_transposed, checked=False), "transpose_kernel"),
        ("bounds", mask, partial(_transposed, checked=True), "transpose_kernel"),
        *((f"dense-{name}", mask, partial(_dense, dtype), "dense_mask_kernel")
          for name, dtype in (("bool", torch.bool), ("bf16", torch.bfloat16), ("fp32", torch.float32))),
        ("parents", lambda device: torch.tensor([parents_of(*forest)], device=device),
         lambda values: trees.bounds_of_rows(values, "parents", everything, everything),
         "parents_kernel depths_kernel starts_kernel"),
        ("ends", lambda device: torch.arange(1, 301, device=device)[None],  # subtrees of one token
         lambda values: trees.bounds_of_rows(values, "ends", 5, 7), "ends_kernel depths_kernel starts_kernel"),
        ("bounds-tree", tree, _check_tree, "check_kernel"),
        ("tables", mask, lambda mask: tile_tables(mask, *cuts), "tables_kernel"),
        ("tables-even", mask, lambda mask: tile_tables(mask, *(cut._replace(even=not cut.of_keys) for cut in cuts)),
         "tables_kernel"),
        ("tables-whole-documents", transposed, lambda mask: tile_tables(mask, *cuts, whole_documents=True),
         "tables_kernel"),
        ("tables-tree", tree, lambda mask: tree_tables(mask, *of_tree),
         "tables_kernel extremes_kernel count_kernel fill_kernel"),
    ]  # fmt: skip
    return [Call(name, prepare, launch, frozenset(names.split())) for name, prepare, launch, names in found]


def _intervals(rule: str, reach: tuple[int, int, int], ids: Tensor) -> object:
    return intervals.intervals_of_ids(ids, rule, *reach)


def _transposed(mask: BlockDiagonalMask, *, checked: bool) -> object:
    return intervals.transposed_intervals(mask.key_start, mask.key_stop, mask.num_keys, checked=checked)


def _check_tree(mask: BlockDiagonalMask) -> None:
    assert mask.query_start is not None
    assert mask.query_stop is not None
    trees.assert_bounds(mask.key_start, mask.key_stop, mask.query_start, mask.query_stop)


def _dense(dtype: torch.dtype, mask: BlockDiagonalMask) -> Tensor:
    return dense(mask, dtype, False)
