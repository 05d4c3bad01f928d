"""Every peer's adapter passes the check of results; libraries that aren't installed are replaced by stand-ins."""

import importlib.util
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.harness import peers
from benchmarks.harness.peers import PEERS, one_row, torch_varlen
from tests.benchmarks.harness import stand_ins
from tests.benchmarks.harness.batches import KINDS, batch_of
from tests.benchmarks.harness.test_verify import check

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("tritonpack", "sdpa, dense mask") for kind in KINDS),
        *(("sdpa, padded", kind) for kind in KINDS if kind != "window"),
    ],
)
def test_results_on_any_machine(name: str, kind: str) -> None:
    peer = {peer.name: peer for peer in PEERS}[name]
    check(peer.prepare, batch_of(kind), layout=peer.layout)


def test_sdpa_refuses_windows_much_padding_and_long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="window needs the dense mask"):
        peers.sdpa_padded(batch_of("window"))
    monkeypatch.setattr(peers, "MOST_PADDING", 2)
    with pytest.raises(ValueError, match="4 rows of 80 would be 2 times the tokens"):
        peers.padded(batch_of("causal"))
    monkeypatch.setattr(peers, "LARGEST_DENSE", 100)
    with pytest.raises(ValueError, match="138 x 138 needs too much memory"):
        peers.sdpa_dense_mask(batch_of("causal"))


@pytest.mark.fast("bidirectional")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@every_kind
def test_flex_attention_forward(kind: str) -> None:
    check(peers.flex, batch_of(kind), layout=one_row, backward=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_no_backward_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="no backward here"):
        check(peers.flex, batch_of("causal"), layout=one_row)


@every_kind
@pytest.mark.parametrize("version", stand_ins.TORCH_VERSIONS)
def test_torch_varlen(version: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.put(monkeypatch, "torch.nn.attention.varlen", varlen_attn=stand_ins.TORCH_VERSIONS[version])
    if version == "2.10" and kind == "window":
        with pytest.raises(ValueError, match="has no window"):
            torch_varlen(batch_of(kind))
    else:
        check(torch_varlen, batch_of(kind))


@every_kind
def test_flash_attention_4(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.put(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=stand_ins.flash_attn_varlen_func)
    check(partial(peers.flash_attention, module="flash_attn.cute", unlimited=None), batch_of(kind))


class TestXformers:
    @every_kind
    def test_results(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_ins.put_xformers(monkeypatch)
        check(peers.xformers, batch_of(kind))

    def test_window_off_by_one_fails_the_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Inclusive(stand_ins.BlockDiagonalBias):
            def make_local_attention(self, window_size: int) -> stand_ins.BlockDiagonalBias:
                return super().make_local_attention(window_size + 1)

        stand_ins.put_xformers(monkeypatch, Inclusive)
        with pytest.raises(AssertionError, match="out beyond twice plain attention's error"):
            check(peers.xformers, batch_of("window"), backward=False)

    def test_hidden_package_cannot_be_imported_for_a_while(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """xformers expects modules in flash_attn that the wheel of FlashAttention-4 doesn't have."""
        names = ("flash_attn", "flash_attn.cute")
        before = {name: ModuleType(name) for name in names}
        for name in names:
            monkeypatch.setitem(sys.modules, name, before[name])
        with peers.hidden("flash_attn"):
            assert importlib.util.find_spec("flash_attn") is None
            assert "flash_attn.cute" not in sys.modules
        assert all(sys.modules[name] is before[name] for name in names)


def test_missing_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ModuleNotFoundError):
        peers.flash_attention(batch_of("causal"), "flash_attn.cute", None)


def test_peers_for_a_device() -> None:
    on_cpu = [peer.name for peer in peers.peers_for(KINDS["causal"], torch.device("cpu"))]
    assert on_cpu == ["tritonpack", "sdpa, padded", "sdpa, dense mask"]
    on_gpu: list[Any] = peers.peers_for(KINDS["ungrouped"], torch.device("cuda"))
    assert {peer.name for peer in on_gpu} > {*on_cpu, "FlashAttention-2 (torch)", "FlexAttention"}
    assert len({peer.name for peer in PEERS}) == len(PEERS)
