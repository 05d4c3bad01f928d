"""install(): how packages, such as transformers, find flash_attn; and uninstall()."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.fresh import FreshInterpreters
from tritonpack import flash_attn
from tritonpack.flash_attn import bert_padding, fa2
from tritonpack.flash_attn.shim import NAME, VERSION


def state() -> tuple[dict[str, ModuleType], list[str]]:
    return dict(sys.modules), list(sys.path)


@pytest.fixture(autouse=True)
def _undone() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


def test_packages_find_it() -> None:
    with flash_attn.install():
        import flash_attn as package
        from flash_attn import flash_attn_interface
        from flash_attn.bert_padding import index_first_axis, unpad_input

        assert all(getattr(package, name) is getattr(fa2, name) for name in fa2.__all__)
        assert all(getattr(flash_attn_interface, name) is getattr(fa2, name) for name in fa2.__all__)
        assert package.flash_attn_interface is flash_attn_interface
        assert package.bert_padding.pad_input is bert_padding.pad_input
        assert (index_first_axis, unpad_input) == (bert_padding.index_first_axis, bert_padding.unpad_input)
        with pytest.raises(ImportError):
            from flash_attn.losses import cross_entropy  # noqa: F401
        with pytest.raises(ImportError, match="_flash_attn_varlen_forward"):
            from flash_attn.flash_attn_interface import _flash_attn_varlen_forward  # noqa: F401
        for name in ("flash_attn", "flash-attn", "Flash_Attn"):
            assert importlib.metadata.version(name) == VERSION == package.__version__
        assert importlib.metadata.packages_distributions()[NAME] == ["flash-attn"]
        for name in (NAME, f"{NAME}.flash_attn_interface", f"{NAME}.bert_padding"):
            assert importlib.util.find_spec(name).name == name  # type: ignore[union-attr]
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn-3")


def test_uninstall() -> None:
    before, handle = state(), flash_attn.install()
    for force in (False, True):
        with pytest.raises(RuntimeError, match="installed already; call uninstall"):
            flash_attn.install(force=force)
    sys.modules[f"{NAME}.extra"] = ModuleType(f"{NAME}.extra")
    for _ in range(2):
        handle.uninstall()
        assert state() == before
    assert importlib.util.find_spec(NAME) is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(NAME)


def test_the_real_one_is_replaced_by_force_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("__version__ = '1.0'")
    metadata = tmp_path / "flash_attn-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 1.0\n")
    for imported in (False, True):
        if imported:
            sys.modules.update({NAME: ModuleType(NAME), f"{NAME}.layers": ModuleType(f"{NAME}.layers")})
        else:
            monkeypatch.syspath_prepend(tmp_path)
        before = state()
        with pytest.raises(RuntimeError, match=r"installed or imported; .*force=True"):
            flash_attn.install()
        assert state() == before
        with flash_attn.install(force=True):
            assert importlib.import_module(NAME).__version__ == VERSION == importlib.metadata.version(NAME)
            assert f"{NAME}.layers" not in sys.modules
        assert state() == before
        monkeypatch.undo()


@pytest.mark.parametrize("unused", [None, [[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]], ids=["", "unused"])
def test_unpad_and_pad(unused: Any) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    unused = None if unused is None else torch.tensor(unused)
    kept = mask if unused is None else mask + unused
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, mask, unused)
    begins, most = ([0, 2, 2, 5], 3) if unused is None else ([0, 3, 3, 7], 4)
    assert (cu.tolist(), cu.dtype, longest, used.tolist()) == (begins, torch.int32, most, [2, 0, 3])
    assert torch.equal(rows, x[kept.bool()])
    back = bert_padding.pad_input(rows, indices, 3, 4)
    assert torch.equal(back, x * kept[..., None, None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, kept[..., None, None].expand_as(x).float())


# transformers looks for a GPU before a model may use FlashAttention; the program replaces that function.
TRANSFORMERS = """
import torch, transformers
from transformers.utils import import_utils
import transformers.modeling_flash_attention_utils as functions

import_utils.is_torch_cuda_available = lambda: True
functions.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["supported_devices"] = ((lambda: True, "cpu"),)
assert not import_utils.is_flash_attn_2_available()  # transformers caches this result

from tritonpack import flash_attn
positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
documents = (positions == 0).cumsum(1)[0]
dense = (documents[:, None] == documents).tril().log()[None, None]
padded = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])

def losses(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation=implementation)
    model = transformers.LlamaForCausalLM(config).train()
    rows, packed = torch.randint(64, (2, 9)), torch.randint(64, (1, 12))
    mask = None if implementation == "flash_attention_2" else dense
    logits = [model(rows).logits, model(rows, attention_mask=padded).logits * padded[..., None],
              model(packed, position_ids=positions, attention_mask=mask).logits]
    weight = model.model.layers[0].self_attn.k_proj.weight
    return logits + [torch.autograd.grad(x.square().mean(), weight)[0] for x in logits]

with flash_attn.install():
    assert import_utils.is_flash_attn_2_available()
    assert import_utils.is_flash_attn_greater_or_equal("2.4.1")
    got = losses("flash_attention_2")
    assert functions._flash_varlen_fn is flash_attn.flash_attn_varlen_func
for x, y in zip(got, losses("eager"), strict=True):
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
assert not import_utils.is_flash_attn_2_available()
try:
    losses("flash_attention_2")
except ImportError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_transformers(fresh: FreshInterpreters) -> None:
    """A model with FlashAttention-2 after install() equals eager attention: plain, padded and packed."""
    pytest.importorskip("transformers")
    result = fresh.run(TRANSFORMERS)
    assert result.returncode == 0, result.stderr
    assert "refused: FlashAttention2 has been toggled on" in result.stdout
