"""What pieces of a document do to states of recurrences, without ranks; the bytes that travel are in test_pieces.py."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention

from tests.parallel.recurrent_cases import in_float64
from tritonpack.parallel.recurrences import BLOCK, LIGHTNING, RECURRENCES, lightning_attention

ROWS, HEADS, GROUPS, WIDTH, KEYS = 150, 4, 2, 3, 5
SPLITS = {"three pieces": (20, 1, 24), "four pieces": (1, BLOCK + 1, 18, 2)}
EACH_SPLIT = pytest.mark.parametrize("split", ["three pieces", pytest.param("four pieces", marks=pytest.mark.slow)])


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def delta_rule(groups, g):
    queries, keys = draw(1, ROWS, groups, KEYS), draw(1, ROWS, groups, KEYS)
    beta = draw(1, ROWS, HEADS).sigmoid()
    return {"query": queries, "key": keys, "value": draw(1, ROWS, HEADS, WIDTH), "g": logsigmoid(g), "beta": beta}


def lightning():
    slope = torch.tensor([0.5, 0.25, 0.1, 0.01], dtype=torch.float64)[:, None, None]
    block = torch.arange(16, dtype=torch.float64)[:, None]
    decay = torch.where(block >= block.T, (-slope * (block - block.T)).exp(), 0.0)
    module = SimpleNamespace(block_size=16, slope_rate=slope, diagonal_decay=decay[None])
    module.query_decay, module.key_decay = (-slope * (block + 1)).exp(), (-slope * (15 - block)).exp()
    return {name: draw(1, ROWS, HEADS, KEYS) for name in ("query", "key", "value")} | {"module": module}


# The function, its arguments, and others that aren't tensors.
CASES = {
    "torch_chunk_gated_delta_rule": (
        partial(torch_chunk_gated_delta_rule, use_qk_l2norm_in_kernel=True),
        lambda: delta_rule(GROUPS, draw(1, ROWS, HEADS)),
    ),
    "chunk_kimi_delta_attention": (
        partial(chunk_kimi_delta_attention, use_qk_l2norm_in_kernel=True),
        lambda: delta_rule(HEADS, draw(1, ROWS, HEADS, KEYS)),
    ),
    "mamba2_chunk_scan": (
        partial(mamba2_chunk_scan, chunk_size=16),
        lambda: {
            "hidden_states": draw(1, ROWS, HEADS, WIDTH), "dt": draw(1, ROWS, HEADS), "A": -draw(HEADS).exp(),
            "B": draw(1, ROWS, GROUPS, KEYS), "C": draw(1, ROWS, GROUPS, KEYS), "D": draw(HEADS),
            "dt_bias": draw(HEADS), "dt_softplus": True, "dt_limit": (0.01, 1.0),
        },
    ),
    "mamba_selective_scan": (
        mamba_selective_scan,
        lambda: {
            "hidden_states": draw(1, WIDTH, ROWS), "dt": draw(1, WIDTH, ROWS), "A": -draw(WIDTH, KEYS).exp(),
            "B": draw(1, KEYS, ROWS), "C": draw(1, KEYS, ROWS), "D": draw(WIDTH), "z": draw(1, WIDTH, ROWS),
            "delta_bias": draw(WIDTH), "delta_softplus": True,
        },
    ),
    "rwkv_linear_attention": (
        rwkv_linear_attention,
        lambda: {
            "time_decay": draw(WIDTH), "time_first": draw(WIDTH),
            "key": 8 * draw(1, ROWS, WIDTH), "value": draw(1, ROWS, WIDTH),
        },
    ),
    "rg_lru._rnn_scan": (
        partial(RecurrentGemmaRglru._rnn_scan, None),
        lambda: {
            "hidden_states": draw(1, ROWS, WIDTH), "recurrent_gate": draw(1, ROWS, WIDTH).sigmoid(),
            "reset": torch.arange(ROWS)[None, :, None] == 0, "recurrent_states": None,
        },
    ),
    "lightning": (lightning_attention, lightning),
}  # fmt: skip


def in_pieces(own, recurrence, given, lengths):
    """The outputs of pieces, each with the state that the pieces before it leave."""
    outs, joined = [], None
    for number, stop in enumerate(torch.tensor(lengths).cumsum(0).tolist()):
        start, dim = stop - lengths[number], recurrence.dim
        rows = {name: given[name].narrow(dim, start, lengths[number]) for name in recurrence.rows}
        effect = recurrence.effect(partial(own, **given | rows), given | rows, number == 0)
        outs.append(effect.outputs(None if joined is None else joined[1][0]))
        new = effect.transition[None], effect.addition[None]
        joined = new if joined is None else recurrence.join(*joined, *new)
    return torch.cat(outs, recurrence.dim)


def outputs_and_gradients(compute, given):
    leaves = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out = compute(given | leaves)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype))
    return {"outputs": out.detach()} | {name: x.grad for name, x in leaves.items()}


def whole(own, recurrence, given, rows=ROWS):
    given = given | {name: given[name].narrow(recurrence.dim, 0, rows) for name in recurrence.rows}
    result = own(**given)
    return result[0] if recurrence.pair else result


@EACH_SPLIT
@pytest.mark.parametrize("name", CASES)
def test_pieces_with_states_equal_the_whole_document(name, split):
    torch.manual_seed(0)
    own, make = CASES[name]
    recurrence, given = RECURRENCES.get(name, LIGHTNING), make()
    with in_float64():
        lengths = SPLITS[split]
        wanted = outputs_and_gradients(lambda given: whole(own, recurrence, given, sum(lengths)), given)
        got = outputs_and_gradients(lambda given: in_pieces(own, recurrence, given, lengths), given)
    for what, tensor in wanted.items():
        torch.testing.assert_close(got[what], tensor, rtol=0, atol=1e-12 * tensor.abs().max().item(), msg=what)


# Numbers in a transition and an addition, by docs/sequence-parallelism.md.
SIZES = {
    "torch_chunk_gated_delta_rule": HEADS * KEYS * (KEYS + WIDTH),
    "chunk_kimi_delta_attention": HEADS * KEYS * (KEYS + WIDTH),
    "mamba2_chunk_scan": HEADS * (WIDTH * KEYS + 1),
    "lightning": HEADS * (KEYS * KEYS + 1),
    "mamba_selective_scan": 2 * WIDTH * KEYS,
    "rg_lru._rnn_scan": 2 * WIDTH,
    "rwkv_linear_attention": 3 * WIDTH,
}


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_elements_have_the_sizes_that_the_docs_say(name, begins):
    own, make = CASES[name]
    recurrence, given = RECURRENCES.get(name, LIGHTNING), make()
    given |= {name: given[name].narrow(recurrence.dim, 0, 3) for name in recurrence.rows}
    with in_float64():
        effect = recurrence.effect(partial(own, **given), given, begins)
    assert effect.transition.numel() + effect.addition.numel() == SIZES[name]


def cast(given, dtype):
    def one(x):
        if isinstance(x, SimpleNamespace):
            return SimpleNamespace(**cast(vars(x), dtype))
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return {name: one(x) for name, x in given.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pieces_round_as_the_whole_document_does(name):
    """In bfloat16: at most twice the error of the function on the whole document, plus a rounding."""
    torch.manual_seed(0)
    own, make = CASES[name]
    recurrence, given = RECURRENCES.get(name, LIGHTNING), make()
    low = cast(given, torch.bfloat16)
    high = cast(low, torch.float64)
    with in_float64():
        exact = outputs_and_gradients(lambda given: whole(own, recurrence, given), high)
    plain = outputs_and_gradients(lambda given: whole(own, recurrence, given), low)
    got = outputs_and_gradients(lambda given: in_pieces(own, recurrence, given, SPLITS["four pieces"]), low)
    for what, tensor in exact.items():
        off, allowed = ((some[what] - tensor).abs().max() / tensor.abs().max() for some in (got, plain))
        assert off <= 2 * allowed + 2**-8, what
