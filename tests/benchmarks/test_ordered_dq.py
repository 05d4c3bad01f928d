"""One ordered pass beside two: the simulation, and the sketch of its kernel in the emulator and by the compiler."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks import ordered_dq
from benchmarks.ordered_dkdv import ordered_dkdv_kernel
from benchmarks.ordered_dq import KEYS, QUERIES, compile_one_pass, one_pass, work
from tests.kernels import gluon_emulator
from tests.kernels.gluon_emulator import Descriptor, Emulated, HazardError, Pointer, Shared, machine
from tests.kernels.sass import count, loops, parse
from tests.kernels.test_hopper import LONG
from tritonpack import BlockDiagonalMask, varlen_attention
from tritonpack.backends.gluon import _swizzled
from tritonpack.backends.tile_table import Cut, tile_tables
from tritonpack.kernels.primitives import LOG2E
from tritonpack.testing import Case, make_inputs
from tritonpack.testing.cases import Inputs
from tritonpack.testing.tolerance import check_outputs

LAYOUT = gl.NVMMASharedLayout(128, 32, rank=3)
BLOCK = 32  # queries of a block in the emulator


class Additions:
    """Copies that add to global memory, and numbers that programs count up there, for the emulator."""

    def __init__(self) -> None:
        self.requested: list[tuple[Descriptor, list[int], Shared, Tensor]] = []
        self.polls = 0

    def request(self, sums: Descriptor, place: Any, source: Shared) -> None:
        if any(buffer == source.buffer for _, buffer in machine().unfenced):
            raise HazardError("a copy reads what an ordinary store wrote, without a fence")
        self.requested.append((sums, [int(x) for x in place], source, source.data.clone()))
        machine().pause()

    def wait(self, pendings: int, read_only: bool) -> None:
        machine().pause()
        for sums, place, source, then in self.requested:
            if not torch.equal(source.data, then):
                raise HazardError("a copy's source was overwritten before the copy was waited for")
            ends = [min(p + n, size) for p, n, size in zip(place, then.shape, sums.rows.shape, strict=True)]
            part = sums.rows[tuple(slice(p, e) for p, e in zip(place, ends, strict=True))]
            part += then[tuple(slice(n) for n in part.shape)]
        self.requested = []

    def count(self, pointer: Pointer, value: int, sem: str) -> Tensor:
        before = pointer.data[int(pointer.offset)].clone()
        assert (sem, value) in (("acquire", 0), ("release", 1))
        if value and self.requested:
            raise HazardError("the turn is passed on before what was added is there")
        self.polls = 0 if value else self.polls + 1
        if self.polls > 1000:
            raise HazardError("a turn that never comes")
        pointer.data[int(pointer.offset)] += value
        machine().pause()
        return before


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> Additions:
    made = Additions()
    tma = SimpleNamespace(async_atomic_add=made.request, store_wait=made.wait)
    monkeypatch.setitem(gluon_emulator.STAND_INS, "tma", tma)
    monkeypatch.setattr(gluon_emulator.LANGUAGE, "atomic_add", made.count, raising=False)
    monkeypatch.setattr(gluon_emulator.LANGUAGE, "NVMMASharedLayout", lambda *_, **__: None, raising=False)
    return made


def gradients(inputs: Inputs, *, seed: int = 0, moved: int = 0) -> dict[str, Tensor]:
    """dq, dk and dv by the sketch in the emulator; `moved` is added to the place of the second tile."""
    q, k, v, dout, mask = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.mask
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    out, lse = varlen_attention(q, k, v, mask, return_lse=True, backend="blocked")
    (tiles,) = tile_tables(mask, Cut(128, BLOCK, of_keys=True))
    queries, lines = mask.transpose(), -(-tokens // BLOCK)
    places, added = torch.zeros(len(tiles), lines, dtype=torch.int32), torch.zeros(lines, dtype=torch.int32)
    for number, (first, end) in enumerate(tiles[:, :2].tolist()):
        places[number] = added
        if first < end:
            added[int(queries.key_start[first]) // BLOCK : -(-int(queries.key_stop[end - 1]) // BLOCK)] += 1
    places[1] += moved
    sums, turns = torch.zeros(tokens, heads, head_dim), torch.zeros(heads, lines, dtype=torch.int32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    sizes = [heads, tokens, head_dim], [head_dim, heads * head_dim, 1], [1, BLOCK, head_dim // 2]
    delta = (out.float() * dout.float()).sum(2).T - (0 if inputs.dlse is None else inputs.dlse)
    names = ("t", "h")
    strides = {f"stride_{x}{name}": stride for x, of in (("q", q), ("do", dout), ("dk", dk), ("dv", dv))
               for name, stride in zip(names, of.stride(), strict=False)}  # fmt: skip
    arguments = {
        "q_desc": _swizzled(q, BLOCK), "k_desc": _swizzled(k, 64), "v_desc": _swizzled(v, 64),
        "dout_desc": _swizzled(dout, BLOCK), "dq_desc": TensorDescriptor(sums, *sizes, LAYOUT),
        "q_ptr": q, "dout_ptr": dout, "lse2_ptr": (lse * LOG2E.value).contiguous(), "delta_ptr": delta.contiguous(),
        "dk_ptr": dk, "dv_ptr": dv, "turns_ptr": turns, "places_ptr": places, "tiles_ptr": tiles,
        "key_start_ptr": mask.key_start, "key_stop_ptr": mask.key_stop,
        "query_start_ptr": queries.key_start, "query_stop_ptr": queries.key_stop,
        "num_queries": tokens, "num_kv_heads": kv_heads,
        "scale": head_dim**-0.5, "scale_log2": head_dim**-0.5 * LOG2E.value,
        "GROUP": heads // kv_heads, "BLOCK_M": BLOCK, "BLOCK_D": head_dim, "STAGES": 2, "LOAD_REGISTERS": 24,
        "COMPUTE_REGISTERS": 240, **strides,
    }  # fmt: skip
    Emulated(ordered_dkdv_kernel, seed)[(kv_heads * len(tiles),)](**arguments)
    assert torch.equal(turns, added.expand_as(turns))
    return {"dq": sums.to(q.dtype), "dk": dk, "dv": dv}


CASES = (
    replace(LONG, heads=2, slack=0),
    Case("bidirectional", (70, 0, 150, 1, 20), heads=2, kv_heads=2, head_dim=64, causal=False),
    Case("window", (200, 33), heads=1, kv_heads=1, head_dim=64, window=(40, 0)),
)


@pytest.mark.usefixtures("additions", "poisoned_memory")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_exact_in_any_order_of_events(case: Case) -> None:
    inputs = make_inputs(case, torch.float16)
    first = gradients(inputs)
    check_outputs(inputs, first)
    again = gradients(inputs, seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.usefixtures("additions")
def test_tiles_wait_for_their_turn() -> None:
    with pytest.raises(HazardError, match="a turn that never comes"):
        gradients(make_inputs(CASES[0], torch.float16), moved=1)


@pytest.mark.compile
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.skipif(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="no copies that add")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiled_sketch_has_the_products_that_are_counted(head_dim: int) -> None:
    resources, listing = compile_one_pass(head_dim)
    assert "UTMAREDG" in listing
    assert resources.shared_bytes <= 227 * 1024
    code = parse(listing)
    bodies = loops(code)
    assert len(bodies) == 4
    for body in bodies:
        units = count(code.instructions[body.start : body.stop]).cycles(8)
        counted = work(head_dim, one_pass=True)
        assert units["tensor"] == counted["tensor"]
        copies = (2 * 2 + 4) * QUERIES * head_dim / 128  # by TMA: q, dout and dQ
        assert counted["shared"] <= units["shared"] + copies <= 1.2 * counted["shared"]


def test_order_costs_time_where_tiles_share_queries() -> None:
    """Tiles of one document add to the same queries. Those of documents of a block each never wait."""
    for lengths, waits in (([4096], True), ([64] * 64, False)):
        mask = BlockDiagonalMask.from_seqlens(lengths)
        (keys,) = tile_tables(mask, Cut(KEYS, of_keys=True))
        keys = keys[keys[:, 0] < keys[:, 1]]
        assert (one_pass(mask, keys, ordered=True) > one_pass(mask, keys, ordered=False)) is waits


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    ordered_dq.main(["--tokens", "2048"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:5] == ["head", "dimension", "128,", "one", "pass"]
    assert "tensor  2560  special   512  shared  2944  added bytes 32768" in lines[3]
    assert [line.split()[0] for line in lines[5:]] == ["one", "skewed", "stdlib", "flan", "orca", "openchat", "tiny"]
    assert all(float(line.split()[1]) >= 1 for line in lines[5:])
