"""Every peer's adapter through the check that its figures depend on; peers that aren't here by stand-ins."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.peers import PEERS, hidden
from tests.benchmarks import stand_ins
from tests.benchmarks.batches import KINDS, batch_of
from tritonpack.cli.bench import peers as shared
from tritonpack.cli.bench.batch import Batch
from tritonpack.cli.bench.peers import (
    Attention,
    Peer,
    Prepared,
    one_row,
    ours,
    packed,
    repeated,
    torch_knows_groups,
    torch_varlen,
)
from tritonpack.cli.bench.verify import Judge

every_kind = pytest.mark.parametrize("kind", KINDS)


def check(prepare: Any, batch: Batch, *, layout: Any = packed, backward: bool = True, count: int = 512) -> None:
    prepared, judge = Prepared(Peer("", prepare, layout), batch), Judge(batch, count)
    out = prepared.forward()
    judge.check_forward(prepared.layout.leave(out))
    if backward:
        judge.check_backward(out, prepared)


@every_kind
@pytest.mark.parametrize("name", ["tritonpack", "tritonpack, mask built", "sdpa, dense mask"])
def test_what_runs_anywhere(name: str, kind: str) -> None:
    peer = {peer.name: peer for peer in PEERS}[name]
    check(peer.prepare, batch_of(kind), layout=peer.layout)


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "ungrouped"])
def test_padded(kind: str) -> None:
    check(shared.sdpa_padded, batch_of(kind), layout=shared.padded)


def test_padded_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="window needs the dense mask"):
        shared.sdpa_padded(batch_of("window"))
    monkeypatch.setattr(shared, "MOST_PADDING", 2)
    with pytest.raises(ValueError, match="4 rows of 80 would be 2 times the tokens"):
        shared.padded(batch_of("causal"))
    monkeypatch.setattr(shared, "LARGEST_DENSE", 100)
    with pytest.raises(ValueError, match="138 x 138 is out of the question"):
        shared.sdpa_dense_mask(batch_of("causal"))


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@every_kind
def test_flex_attention_forward(kind: str) -> None:
    check(peers.flex, batch_of(kind), layout=one_row, backward=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_no_backward_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="no backward here"):
        check(lambda batch: peers.flex(batch, build=True), batch_of("causal"), layout=one_row)


class TestTorch:
    @pytest.fixture(params=stand_ins.TORCH_VERSIONS)
    def torch_version(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        stand_ins.put(monkeypatch, "torch.nn.attention.varlen", varlen_attn=stand_ins.TORCH_VERSIONS[request.param])
        return request.param

    @every_kind
    def test_heads_repeated(self, torch_version: str, kind: str) -> None:
        prepare = repeated(torch_varlen)
        if torch_version == "2.10" and kind == "window":
            with pytest.raises(ValueError, match="has no window"):
                prepare(batch_of(kind))
        else:
            check(prepare, batch_of(kind))

    def test_grouped_heads(self, torch_version: str) -> None:
        assert torch_knows_groups() == (torch_version == "2.12")
        if torch_version == "2.12":
            check(torch_varlen, batch_of("causal"))
        else:
            with pytest.raises(ValueError, match="4 heads and key 2"):
                check(torch_varlen, batch_of("causal"))

    def test_who_is_repeated(self, torch_version: str) -> None:
        peer = {peer.name: peer for peer in PEERS}["FlashAttention-2 (torch), heads repeated"]
        assert peer.meant_for(KINDS["causal"]) == (torch_version != "2.12")
        assert not peer.meant_for(KINDS["ungrouped"])


@every_kind
@pytest.mark.parametrize("version", stand_ins.FLASH_4)
def test_flash_attention_4(version: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.put(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=stand_ins.FLASH_4[version])
    check(peers.flash_attention_4, batch_of(kind))


class TestXformers:
    @pytest.mark.parametrize("kind", ["causal", "bidirectional", "window"])
    def test_grouped_heads_forward_alone(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_ins.put_xformers(monkeypatch)
        check(peers.xformers, batch_of(kind), backward=False)
        with pytest.raises(NotImplementedError, match="no backward"):
            check(peers.xformers, batch_of(kind))

    @every_kind
    def test_heads_repeated(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_ins.put_xformers(monkeypatch)
        check(repeated(peers.xformers), batch_of(kind))

    def test_a_window_counted_otherwise_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Inclusive(stand_ins.BlockDiagonalBias):
            def make_local_attention(self, window_size: int) -> stand_ins.BlockDiagonalBias:
                return super().make_local_attention(window_size + 1)

        stand_ins.put_xformers(monkeypatch, Inclusive)
        with pytest.raises(AssertionError, match="out beyond twice plain attention's error"):
            check(peers.xformers, batch_of("window"), backward=False)

    def test_is_imported_as_if_there_were_no_flash_attn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where it finds one it wants modules that FlashAttention-4's wheel doesn't have."""
        names = ("flash_attn", "flash_attn.cute")
        before = {name: ModuleType(name) for name in names}
        for name in names:
            monkeypatch.setitem(sys.modules, name, before[name])
        with hidden("flash_attn"):
            assert importlib.util.find_spec("flash_attn") is None
            assert "flash_attn.cute" not in sys.modules
        assert all(sys.modules[name] is before[name] for name in names)


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ModuleNotFoundError):
        peers.flash_attention_4(batch_of("causal"))


def test_names_are_told_apart() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)


class TestJudge:
    """It sees what is wrong, also where it draws only some of the rows."""

    def judged(self, wrong: Any, count: int = 512) -> None:
        def prepare(batch: Batch) -> Attention:
            attention = ours(batch)
            return lambda q, k, v: wrong(attention, q, k, v)

        check(prepare, batch_of("causal"), count=count)

    @pytest.mark.parametrize("count", [512, 40])
    def test_accepts_what_is_right(self, count: int) -> None:
        self.judged(lambda attention, *qkv: attention(*qkv), count)

    @pytest.mark.parametrize("count", [512, 40])
    def test_a_leak_between_documents(self, count: int) -> None:
        def leaking(attention: Attention, *qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in qkv)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        with pytest.raises(AssertionError, match="out beyond"):
            self.judged(leaking, count)

    def test_a_gradient_that_is_a_thousandth_off(self) -> None:
        with pytest.raises(AssertionError, match="dv beyond"):
            self.judged(lambda attention, q, k, v: attention(q, k, v * 0.999 + v.detach() * 0.001))

    def test_a_value_that_is_not_finite_in_a_row_that_was_not_drawn(self) -> None:
        batch = batch_of("causal")
        rows = set(Judge(batch, 40).rows.tolist())
        row = next(i for i in range(138) if i not in rows)
        with pytest.raises(AssertionError, match="isn't finite"):
            self.judged(lambda attention, *qkv: attention(*qkv).index_fill(0, torch.tensor([row]), torch.nan), 40)

    def test_a_gradient_where_there_should_be_none(self) -> None:
        with pytest.raises(AssertionError, match="dq isn't zero"):
            self.judged(lambda attention, q, k, v: attention(q, k, v) + 1e-30 * (q.flip(0) - q.flip(0).detach()), 40)

    def test_another_shape(self) -> None:
        with pytest.raises(AssertionError, match="shape"):
            self.judged(lambda attention, *qkv: attention(*qkv)[1:])

    def test_rows_hold_the_ends_of_documents(self) -> None:
        rows = Judge(batch_of("causal"), 20).rows
        assert {38, 117, 37, 118, 137} <= set(rows.tolist())  # the longest, the shortest and the median document
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert len(rows) <= 20
