"""Logits that are computed when they are read: what reads the memory of a tensor gets that of plain logits."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing  # which teaches ForkingPickler tensors
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel

import tritonpack
from tests.patches.models import tiny_model
from tests.patches.test_head_targets import completions
from tests.patches.test_unpad import padded
from tritonpack.patches.later_logits import LaterLogits

READ: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "numpy by force": lambda x: x.numpy(force=True),
    "cpu": lambda x: x.cpu().numpy(),
    "float": lambda x: x.float().cpu().numpy(),
    "double": lambda x: x.double().numpy(),
    "detached": lambda x: x.detach().cpu().numpy(),
    "array": np.array,
    "array of a dtype": lambda x: np.asarray(x, dtype=np.float32),
    "ufunc": np.exp,
    "list": lambda x: x.tolist(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "shared": lambda x: x.share_memory_(),
    "is shared": lambda x: x.is_shared(),
    "dlpack": torch.from_dlpack,
    "dlpack of numpy": np.from_dlpack,
    "storage": lambda x: x.untyped_storage().nbytes(),
    "typed storage": lambda x: x.storage().nbytes(),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "queue": lambda x: pickle.loads(ForkingPickler.dumps(x)),
    "data": lambda x: x.data.numpy(),
    "item": lambda x: x[0, 0, 0].item(),
    "memory": lambda x: x.data_ptr() > 0,
    "format": lambda x: f"{x}",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_reading_them_is_reading_plain_logits(dtype: torch.dtype) -> None:
    model, batch = tiny_model("llama", dtype=dtype).requires_grad_(requires_grad=False), completions()
    tritonpack.patch(model, unpad=True)
    for name, read in READ.items():
        logits = model(**batch).logits
        plain = model(**batch).logits.clone()
        assert isinstance(logits, LaterLogits)
        assert type(plain) is Tensor
        # NumPy warns of tensors: `__array__` and `__array_wrap__` of torch 2.13 lack parameters that NumPy 2 wants.
        with warnings.catch_warnings(record=True) as of_plain:
            warnings.simplefilter("always", DeprecationWarning)
            want = read(plain)
        with warnings.catch_warnings(record=True) as of_later:
            warnings.simplefilter("always", DeprecationWarning)
            got = read(logits)
        assert [str(one.message) for one in of_later if one.category is DeprecationWarning] == [
            str(one.message) for one in of_plain if one.category is DeprecationWarning
        ]
        if name == "copy":  # it is the same tensor
            got, want = got + 0, want + 0
        assert type(got) is type(want), name
        assert torch.equal(got, want) if isinstance(want, Tensor) else np.array_equal(got, want), name


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of torch, as above
def test_errors_are_those_of_logits_with_gradients() -> None:
    model = tiny_model("llama")
    tritonpack.patch(model, unpad=True)
    logits = model(**completions()).logits
    assert isinstance(logits, LaterLogits)
    for name in ("numpy", "array", "cpu", "deepcopy"):
        errors = []
        for one in (logits, logits.clone()):
            with pytest.raises(RuntimeError) as caught:
                READ[name](one)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_outputs_are_copied_shared_and_saved() -> None:
    model = tiny_model("llama").requires_grad_(requires_grad=False)
    tritonpack.patch(model, unpad=True)
    output = model(**completions())
    twin = copy.deepcopy(output)
    assert type(twin) is type(output)
    assert type(twin.logits) is Tensor
    assert torch.equal(twin.logits, output.logits)
    assert twin.logits.data_ptr() != output.logits.data_ptr()
    output.logits.share_memory_()
    assert output.logits.is_shared()
    torch.save(output.logits, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), twin.logits)


@pytest.mark.parametrize("option", ["unpad", "share_prefixes"])
def test_a_loss_of_ones_own_has_the_gradients_of_plain_logits(option: str) -> None:
    """BERT's head holds its bias under two names."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, is_decoder=True, **sizes)
    gradients = []
    for patched in (False, True):
        torch.manual_seed(0)
        model = BertLMHeadModel(config).double().eval()
        if patched:
            tritonpack.patch(model, **{option: True})
        batch = padded()
        logits = model(**batch).logits
        live = batch["attention_mask"][..., None]
        (logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits) * live).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in gradients[0].items():
        assert want is None or torch.allclose(gradients[1][name], want, rtol=1e-9, atol=1e-12), name
