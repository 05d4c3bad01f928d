"""Patched models of every kind of family on a GPU: documents stay apart, and nothing waits for the device."""

import pytest
import torch

import tritonpack
from tests.patches import zoo
from tritonpack.testing import check_isolation

pytestmark = pytest.mark.gpu

KINDS = (
    "llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "llama4_text", "falcon", "gptj", "bart",
    "opt", "qwen3_moe", "bamba", "qwen3_next", "lfm2",
)  # fmt: skip
# No document is longer than the tables of positions: a place beyond them would end all work on the GPU.
LENGTHS = (90, 1, 33, 120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_documents_stay_apart(name: str, dtype: torch.dtype) -> None:
    model = zoo.tiny_model(name).to("cuda", dtype)
    with tritonpack.patch(model):
        check_isolation(model, lengths=LENGTHS)
    if name == "llama":
        with pytest.raises(tritonpack.IsolationError):
            check_isolation(model, lengths=LENGTHS)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "llama4_text"])
def test_nothing_waits_for_the_device(name: str) -> None:
    model = zoo.tiny_model(name).cuda()
    ids = torch.randint(10, zoo.VOCAB, (1, 300), device="cuda")
    places = (torch.arange(300, device="cuda") % 70)[None]
    with tritonpack.patch(model):
        call = {"position_ids": places, "attention_mask": torch.ones_like(ids), "use_cache": False}
        model(ids, **call)  # kernels compile
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids, **call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
