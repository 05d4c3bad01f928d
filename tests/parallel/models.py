"""Small models and batches for tests of SequenceParallel; running them on one process and on ranks.

Everything is in float64. Parts of models that cast to float32 are replaced, or run `in_float64`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.patches import zoo
from tests.patches.models import VOCAB, tiny_model
from tritonpack import SequenceParallel, patch

TOLERANCE = 1e-12  # relative to a tensor's largest number
SINGLE = 1e-5  # the same for float32
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SPECIFIC = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}
LENGTHS = (3, 29, 1, 11, 7)  # 51 tokens: neither 2 nor 4 divides them
ROUTER_WEIGHT = 0.5


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


def exact_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """transformers' causal loss, without its cast to float32."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(
        logits.flatten(0, -2), shift_labels.flatten(), ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def exact_norm(norm, x):
    """Gemma's norm, without its cast to float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (1.0 + norm.weight)


def make_model(family="llama", **overrides):
    """A model of SPECIFIC's or other dense families, which computes in float64 by itself."""
    model = tiny_model(family, attention="eager", **GROUPED | SPECIFIC.get(family, {}) | overrides).train()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    for module in model.modules():
        if type(module).__name__ == "Gemma2RMSNorm":
            module.forward = partial(exact_norm, module)
    model.loss_function = exact_loss
    return model


def make_known_model():
    """With transformers' own loss, so that it isn't proven when a context is entered."""
    model = make_model()
    del model._loss_function
    return model


def make_float32_model():
    return make_known_model().float()


def make_zoo_model(name, **overrides):
    """A model of any type, which needs `in_float64`."""
    torch.manual_seed(0)
    model = zoo.tiny_model(name, **overrides).double().eval()
    for module in model.modules():
        if type(module).__name__ == "MiniMaxLightningAttention":  # its decays were rounded to float32
            with in_float64():
                rate = module.get_slope_rate()
                decays = module.decay_factors(rate)
            names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
            module.load_state_dict(dict(zip(names, (rate, *decays), strict=True)), strict=False)
    for home in (model, model.config.get_text_config()):
        for setting in ("router_aux_loss_coef", "aux_loss_coef"):
            if hasattr(home, setting):
                setattr(home, setting, ROUTER_WEIGHT)
    return model


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


@cache
def mesh_of(*shape):
    """A mesh of all ranks; its last two dimensions are those of an exchange."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "across", "within")[-len(shape) :])


def numbers(*shape, seed=1):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def positions(lengths):
    return torch.cat([torch.arange(n) for n in lengths])


def packed(lengths=LENGTHS, seed=1):
    """One row of documents. Their first tokens and some others have no target."""
    ids, places = numbers(1, sum(lengths), seed=seed), positions(lengths)[None]
    labels = ids.masked_fill((places == 0) | (ids % 5 == 0), -100)
    return {"input_ids": ids, "position_ids": places, "labels": labels}


def make_batch(number):
    """Four documents of 41 to 54 tokens together, other ones for each number."""
    return packed((13, 1, 22 + number % 4, 5 + 5 * (number % 3)), seed=number)


def two_rows():
    """Two rows of several documents, one with padding at its end."""
    ids = numbers(2, 23)
    places = torch.stack([positions((9, 14)), positions((4, 1, 12, 6))])
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    labels = ids.masked_fill((places == 0) | (mask == 0), -100)
    return {"input_ids": ids, "position_ids": places, "attention_mask": mask, "labels": labels}


def padded():
    """Rows with padding on the right, the left and both sides, one of them with a single token."""
    ids, mask = numbers(4, 15), torch.zeros(4, 15, dtype=torch.long)
    mask[0, 6:] = mask[1, :11] = mask[2, 2:13] = mask[3, :1] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def offsets():
    batch = packed()
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return {**batch, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 29, "max_length_k": 29}


def plain(length):
    """One row that is one document, without positions or a mask."""
    return {"input_ids": numbers(1, length), "labels": numbers(1, length)}


def embeddings():
    batch = packed()
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(1, sum(LENGTHS), 32, dtype=torch.float64, generator=generator)
    return {**{name: x for name, x in batch.items() if name != "input_ids"}, "inputs_embeds": made}


def other_ignored(name):
    """`ignore_index` also marks the last tokens of rows, and the padding of very short batches."""
    batch = BATCHES[name]()
    return {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == -100, 0), "ignore_index": 0}


def one_target():
    """One token has a target, so all ranks but one have none."""
    batch = packed()
    return {**batch, "labels": torch.full_like(batch["labels"], -100).index_fill(1, torch.tensor([20]), 7)}


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f.__name__: f for f in (packed, two_rows, padded, offsets, embeddings)},
    "plain": partial(plain, 22),
    "three_tokens": partial(plain, 3),  # fewer than four ranks, so the batch is padded
}
# No document of these is longer than the share of one of four ranks.
SHORT_DOCUMENTS = {"several": lambda: packed((13, 1, 9, 12, 5, 11)), "few tokens": lambda: packed((3, 3, 2, 3))}


class Result(NamedTuple):
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients_of(model):
    """By the names that parameters have without wrappers."""
    named = ((name.removeprefix("module."), p) for name, p in model.named_parameters())
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def mean_over(group, gradients):
    """Gradients averaged over the group, as DDP does."""
    size = dist.get_world_size(group)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
        gradient /= size
    return gradients


def loss_of(model, **batch):
    return model(**batch).loss


def alone(model, compute=loss_of, *batches):
    """The loss of a patched model in one process, and gradients summed over batches."""
    patch(model)
    return run(model, compute, batches)


@cache
def alone_on(family, batch):
    """`alone` on a batch of BATCHES, cached."""
    return alone(make_model(family), loss_of, BATCHES[batch]())


def on_ranks(model, compute=loss_of, *batches, group=None, **options):
    """The same as `alone`, but ranks of a group share the batches, and gradients are reduced over the group."""
    with SequenceParallel(model, group, **options):
        result = run(model, compute, batches)
    mean_over(None if isinstance(group, DeviceMesh) else group, result.gradients)  # a mesh of all ranks
    return result


def run(model, compute, batches):
    losses = []
    for batch in batches:
        loss = compute(model, **batch)
        loss.backward()
        losses.append(loss.detach())
    return Result(torch.stack(losses), gradients_of(model))


def close(got, wanted, what, tolerance=TOLERANCE):
    size = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * size, msg=lambda text: f"{what}: {text}")


def same(got, wanted, tolerance=TOLERANCE):
    """The losses and every gradient are equal. Some gradients are zero but for rounding, so no scale is below a
    ten-thousandth of the model's largest gradient."""
    close(got.loss, wanted.loss, "loss", tolerance)
    assert got.gradients.keys() == wanted.gradients.keys()
    least = 1e-4 * max(gradient.abs().max() for gradient in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        off = (got.gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=least)
        assert off < tolerance, f"{name} is off by {off:.1e}"


def logits_of(model):
    batch = packed()
    del batch["labels"]
    return model(**batch).logits


def state_of(model):
    """The attributes and hooks of a model that a context may change, by identity."""
    return [
        (
            {name: id(x) for name, x in module.__dict__.items() if name[0] != "_" or name == "_loss_function"},
            list(module._forward_pre_hooks.items()),
            list(module._forward_hooks.items()),
        )
        for module in model.modules()
    ] + [getattr(getattr(model, "config", None), "_attn_implementation", None)]
