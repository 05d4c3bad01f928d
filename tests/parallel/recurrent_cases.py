"""Models with recurrences or convolutions: loss and gradients of ranks equal those of one process to 1e-12.

Layers compute parts in float32 whatever the dtype of the model is, so everything runs in float64 here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.parallel.models import (
    Result,
    alone,
    close,
    gradients_of,
    loss_of,
    on_ranks,
    packed,
    padded,
    two_rows,
)
from tests.patches import zoo
from tritonpack import SequenceParallel
from tritonpack.patches.families import MIXERS

TOLERANCE = 1e-12
# Every type with such layers whose attention ranks can share.
TYPES = (
    "qwen3_next", "mamba2", "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma", "rwkv", "zamba", "zamba2", "zaya",
)  # fmt: skip
FEW = ("qwen3_next", "mamba2", "minimax", "lfm2", "jamba", "rwkv")


class _Widen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return function(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """A context in which tensors that would be made in float32, also by casts, are made in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)


def make(name, **overrides):
    torch.manual_seed(0)
    model = zoo.tiny_model(name, **overrides).double().eval()
    for module in model.modules():
        if type(module).__name__ == "MiniMaxLightningAttention":  # its decays were rounded to float32
            with in_float64():
                rate = module.get_slope_rate()
                decays = module.decay_factors(rate)
            names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
            module.load_state_dict(dict(zip(names, (rate, *decays), strict=True)), strict=False)
    return model


def require_equal(got: Result, wanted: Result) -> None:
    """Compare to 1e-12 of a gradient's largest number. Some gradients are zero but for rounding, so their scale is a
    ten-thousandth of the model's largest gradient."""
    close(got.loss, wanted.loss, "loss", TOLERANCE)
    assert got.gradients.keys() == wanted.gradients.keys()
    least = 1e-4 * max(gradient.abs().max() for gradient in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        off = (got.gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=least)
        assert off < TOLERANCE, f"{name} is off by {off:.1e}"


def several_documents():
    """None is longer than the share of a rank, also of four."""
    return packed((13, 1, 9, 12, 5, 11))


def few_tokens():
    """A document or two for each rank."""
    return packed((3, 3, 2, 3))


def agrees(name, batch=several_documents, checkpoints=False, **options):
    model, other = (make(name) for _ in range(2))
    assert any(type(module).__name__ in MIXERS for module in model.modules())
    if checkpoints:
        other.train().gradient_checkpointing_enable()
    given = {**batch(), "use_cache": False}
    with in_float64():
        wanted = alone(model, loss_of, given)
        require_equal(on_ranks(other, loss_of, given, **options), wanted)


def refuses_a_long_document():
    """Every rank raises, and the context goes on."""
    model, size = make("mamba2"), dist.get_world_size()
    message = rf"a document has 40 of the batch's 45 tokens, .* on one of the {size} ranks\. .* share it among fewer"
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=message):
            model(**packed((2, 40, 3)))
        assert model(**several_documents()).loss.isfinite()


LAYOUTS = [("ring", "zigzag"), ("ring", "stripe"), ("group_cast", "documents"), ("ulysses", "contiguous")]
CASES = {name: partial(agrees, name) for name in TYPES}
CASES |= {
    f"{name}, {batch.__name__}": partial(agrees, name, batch)
    for name in FEW
    for batch in (two_rows, padded, few_tokens)
}
CASES |= {
    f"{name}, {exchange}, {layout}": partial(agrees, name, exchange=exchange, layout=layout)
    for name in FEW[:3]
    for exchange, layout in LAYOUTS
}
CASES |= {
    f"{name}, {what}": partial(agrees, name, **options)
    for name in ("qwen3_next", "mamba2", "mamba", "minimax", "rwkv")
    for what, options in {"checkpoints": {"checkpoints": True}, "summed gradients": {"grad_reduce": "sum"}}.items()
}


def wrapped(wrap):
    """Under DDP and FSDP; layers compute parts in float32 here."""
    model, other, batch = make("qwen3_next"), make("qwen3_next"), several_documents()
    wanted = alone(model, loss_of, batch)
    trained = wrap(other)
    with SequenceParallel(trained):
        loss = trained(**batch).loss
        loss.backward()
    close(loss.detach(), wanted.loss[0], "loss", 1e-6)
    gradients = gradients_of(other)
    assert gradients.keys() == wanted.gradients.keys()
    for name, gradient in gradients.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole, wanted.gradients[name], rtol=1e-4, atol=1e-6)


def sharded(model):
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


CASES |= {wrap.__name__: partial(wrapped, wrap) for wrap in (DistributedDataParallel, sharded)}
CASES["a long document"] = refuses_a_long_document
ALSO_ON_FOUR = [name for name in CASES if any(what in name for what in ("long", "few_tokens", "checkpoints", "ring"))]
