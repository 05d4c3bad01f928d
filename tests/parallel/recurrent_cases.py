"""Models with recurrences or convolutions: loss and gradients of ranks equal those of one process to 1e-12.

Layers compute parts in float32 whatever the dtype of the model is, so everything runs in float64 here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

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
    three_tokens,
    two_rows,
)
from tests.patches import zoo
from tritonpack import SequenceParallel
from tritonpack.parallel.comm import as_ranks
from tritonpack.parallel.layouts import Layout
from tritonpack.parallel.row_travel import RowTravel
from tritonpack.parallel.whole_documents import WholeDocuments
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


def agrees(name, batch=packed, checkpoints=False, config=None, **options):
    model, other = (make(name, **config or {}) for _ in range(2))
    assert any(type(module).__name__ in MIXERS for module in model.modules())
    if checkpoints:
        other.train().gradient_checkpointing_enable()
    given = {**batch(), "use_cache": False}
    with in_float64():
        wanted = alone(model, loss_of, given)
        require_equal(on_ranks(other, loss_of, given, **options), wanted)


def one_document():
    return packed((23,))


LAYOUTS = [("ring", "zigzag"), ("ring", "stripe"), ("group_cast", "documents"), ("ulysses", "contiguous")]
CASES = {name: partial(agrees, name) for name in TYPES}
CASES |= {
    f"{name}, {batch.__name__}": partial(agrees, name, batch)
    for name in FEW
    for batch in (two_rows, padded, three_tokens, one_document)
}
CASES |= {
    f"{name}, {exchange}, {layout}": partial(agrees, name, exchange=exchange, layout=layout)
    for name in FEW[:3]
    for exchange, layout in LAYOUTS
}


def long_document():
    """A document of most tokens, which no rank could compute in its share of the time, between others."""
    return packed((5, 41, 1, 3, 2, 9))


def long_rows():
    """Two rows of a document each, one of them after padding, whose lengths differ much."""
    batch = two_rows()
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, :18] = 0
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def agrees_on_a_long_document(name, batch=long_document, **options):
    """With a document that ranks divide: none computes all of it."""
    with mock.patch.object(WholeDocuments, "fetch", autospec=True, side_effect=WholeDocuments.fetch) as fetch:
        agrees(name, batch, **options)
    assert not fetch.called


CASES |= {f"{name}, long document": partial(agrees_on_a_long_document, name) for name in TYPES}
# One type for each recurrence, and for convolutions.
RECURRENCES = ("qwen3_next", "kimi_linear", "mamba2", "mamba", "minimax", "rwkv", "recurrent_gemma", "lfm2", "zaya")


def among_short_ones():
    return packed((2, 3, 1, 4, 40, 1, 2, 5, 3))


def agrees_at_edges(name):
    """A document that ends where a rank's rows end."""
    lengths, layout = ((45, 15), "zigzag") if dist.get_world_size() == 2 else ((40, 20), "contiguous")
    agrees_on_a_long_document(name, lambda: packed(lengths), layout=layout)


def sends_states_of_one_dtype(name):
    """Also where a layer computes the first states in float32 and the others in the dtype of the model."""
    given = {**long_document(), "use_cache": False}
    wanted = alone(make(name), loss_of, given)
    got = on_ranks(make(name), loss_of, given, exchange="group_cast", layout="contiguous")
    assert abs(got.loss - wanted.loss) < 1e-5


CASES |= {f"{name}, states of one dtype": partial(sends_states_of_one_dtype, name) for name in RECURRENCES}
CASES |= {f"{name}, ends at edges": partial(agrees_at_edges, name) for name in RECURRENCES}
CASES |= {
    f"{name}, one long document, {layout}": partial(agrees_on_a_long_document, name, one_document, layout=layout)
    for name in RECURRENCES
    for layout in ("contiguous", "zigzag")
}
CASES |= {
    f"{name}, among short ones, {exchange}, {layout}": partial(
        agrees_on_a_long_document, name, among_short_ones, exchange=exchange, layout=layout
    )
    for name in RECURRENCES
    for exchange, layout in LAYOUTS
}
CASES |= {
    f"{name}, {what}": partial(agrees, name, **options)
    for name in ("qwen3_next", "mamba2", "mamba", "minimax", "rwkv")
    for what, options in {
        "long rows": {"batch": long_rows},
        "checkpoints": {"checkpoints": True},
        "checkpoints, long document": {"checkpoints": True, "batch": long_document},
        "summed gradients": {"grad_reduce": "sum", "batch": long_document},
    }.items()
}


def wrapped(wrap, batch):
    """Under DDP and FSDP; layers compute parts in float32 here."""
    model, other = make("qwen3_next"), make("qwen3_next")
    wanted = alone(model, loss_of, batch())
    trained = wrap(other)
    with SequenceParallel(trained):
        loss = trained(**batch()).loss
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


CASES |= {
    f"{wrap.__name__}, {batch.__name__}": partial(wrapped, wrap, batch)
    for wrap in (DistributedDataParallel, sharded)
    for batch in (packed, long_document)
}
# Heads that ranks can't divide evenly: groups of heads that two ranks share, and ranks without a head.
CASES |= {
    f"{values} value heads, {keys} key heads": partial(
        agrees_on_a_long_document,
        "qwen3_next",
        config={"linear_num_value_heads": values, "linear_num_key_heads": keys},
    )
    for values, keys in ((6, 3), (6, 2), (2, 1))
}
CASES["6 heads, 3 groups"] = partial(
    agrees_on_a_long_document, "mamba2", config={"num_heads": 6, "n_groups": 3, "hidden_size": 48}
)


def many_chunks():
    """Enough tokens for several chunks of the layout "balanced" on each rank."""
    return packed((3, 900, 5, 1, 300))


CASES |= {
    f"{name}, many chunks": partial(agrees_on_a_long_document, name, many_chunks) for name in ("qwen3_next", "mamba2")
}


def sums_gradients_in_float32():
    """Two of three ranks have less than half a unit in the last place of what the first one has."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(2 * size)
    travel = RowTravel(Layout(rows.split(2)), as_ranks(None), [rows] * size, rows.device)
    x = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    part = 1.0 if rank == 0 else 0.75 * 2**-8
    travel.fetch(x).backward(torch.full((2 * size, 4), part, dtype=torch.bfloat16))
    assert torch.equal(x.grad, torch.full_like(x, 1 + (size - 1) * 0.75 * 2**-8))


CASES["gradients of rows that several ranks got"] = sums_gradients_in_float32
ALSO_ON_FOUR = [
    name
    for name in CASES
    if any(
        what in name
        for what in ("heads", "edges", "one long", "short ones", "checkpoints, long", "three_tokens", "chunks", "got")
    )
]
