"""Every peer's adapter passes the check of results; libraries that aren't installed are replaced by stand-ins."""

import sys
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness import peers
from benchmarks.harness.peers import PEERS, one_row
from tests.benchmarks.harness.batches import KINDS, batch_of
from tests.benchmarks.harness.test_verify import check
from tritonpack.flash_attn import fa4
from tritonpack.flash_attn.torch_varlen import torch_varlen_attn


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:  # fmt: skip
    """The signature of torch 2.12's torch.nn.attention.varlen.varlen_attn."""
    assert cu_seq_k is not None
    return torch_varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=enable_gqa
    )


@wraps(fa4.flash_attn_varlen_func)
def flash_attn_varlen_func(*args: Any, **keywords: Any) -> Any:
    """FlashAttention-4. tritonpack has its signature, but also accepts -1."""
    assert all(side is None or side >= 0 for side in keywords["window_size"])
    return fa4.flash_attn_varlen_func(*args, **keywords)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"torch.nn.attention.varlen": varlen_attn, "flash_attn": None, "flash_attn.cute": flash_attn_varlen_func}
    for name, function in contents.items():
        module = ModuleType(name)
        vars(module).update({function.__name__: function} if function else {})
        monkeypatch.setitem(sys.modules, name, module)


BY_NAME = {peer.name: peer for peer in PEERS}
NAMES = ("tritonpack", "sdpa, padded", "sdpa, dense mask", "FlashAttention-2 (torch)", "FlashAttention-4")
CASES = [(name, kind) for name in NAMES for kind in KINDS if (name, kind) != ("sdpa, padded", "window")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_results(name: str, kind: str) -> None:
    check(BY_NAME[name].prepare, batch_of(kind), layout=BY_NAME[name].layout)


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
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_forward(kind: str) -> None:
    check(peers.flex, batch_of(kind), layout=one_row, backward=False)


def test_peers_for_a_device() -> None:
    on_cpu = [peer.name for peer in peers.peers_for(KINDS["causal"], torch.device("cpu"))]
    assert on_cpu == ["tritonpack", "sdpa, padded", "sdpa, dense mask"]
    on_gpu: list[Any] = peers.peers_for(KINDS["ungrouped"], torch.device("cuda"))
    assert {peer.name for peer in on_gpu} > {*on_cpu, "FlashAttention-2 (torch)", "FlexAttention"}
    assert len({peer.name for peer in PEERS}) == len(PEERS)
