"""Small float64 models and batches for tests of SequenceParallel; running them on one process and on ranks."""

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.patches.models import VOCAB, tiny_model
from tritonpack import SequenceParallel, patch

TOLERANCE = 1e-10  # relative to a tensor's largest number
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SPECIFIC = {
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}
LENGTHS = (3, 29, 1, 11, 7)  # 51 tokens: neither 2 nor 4 divides them


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
    model = tiny_model(family, attention="eager", **GROUPED | SPECIFIC.get(family, {}) | overrides).train()
    if family == "gpt_oss":
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(parameter)
    for module in model.modules():
        if type(module).__name__ == "Gemma2RMSNorm":
            module.forward = partial(exact_norm, module)
    model.loss_function = exact_loss
    return model


def make_float32_model():
    """With transformers' own loss."""
    model = make_model().float()
    del model._loss_function
    return model


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


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


def plain():
    """One row that is one document, without positions or a mask."""
    return {"input_ids": numbers(1, 22), "labels": numbers(1, 22)}


def three_tokens():
    """Fewer tokens than four ranks, so the batch is padded."""
    return {"input_ids": numbers(1, 3), "labels": numbers(1, 3)}


def embeddings():
    batch = packed()
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(1, sum(LENGTHS), 32, dtype=torch.float64, generator=generator)
    return {**{name: x for name, x in batch.items() if name != "input_ids"}, "inputs_embeds": made}


BATCHES = {
    f.__name__: f for f in (packed, two_rows, padded, offsets, plain, three_tokens, embeddings)
}  # fmt: skip


@dataclass
class Result:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean_over(group, gradients, op="mean"):
    """Gradients summed or averaged over the group, as DDP does."""
    size = dist.get_world_size(group)
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
        if op == "mean":
            gradient /= size
    return gradients


def loss_of(model, **batch):
    return model(**batch).loss


def alone(model, compute=loss_of, *batches, **arguments):
    """The loss of a patched model in one process, and gradients summed over batches."""
    patch(model)
    return _run(model, compute, batches, arguments)


@cache
def alone_on(family, batch):
    """`alone` on a batch of BATCHES, cached."""
    return alone(make_model(family), loss_of, BATCHES[batch]())


def on_ranks(model, compute=loss_of, *batches, group=None, grad_reduce="mean", **options):
    """The same as `alone`, but ranks of a group share the batches, and gradients are reduced over the group."""
    with SequenceParallel(model, group, grad_reduce=grad_reduce, **options):
        result = _run(model, compute, batches, {})
    mean_over(None if isinstance(group, DeviceMesh) else group, result.gradients, grad_reduce)  # a mesh of all ranks
    return result


def _run(model, compute, batches, arguments: dict[str, Any]):
    losses = []
    for batch in batches:
        loss = compute(model, **batch, **arguments)
        loss.backward()
        losses.append(loss.detach())
    return Result(torch.stack(losses), gradients_of(model))


def close(got, wanted, what, tolerance=TOLERANCE):
    size = wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * size, msg=lambda text: f"{what}: {text}")


def same(got, wanted):
    """The losses and every gradient are equal within TOLERANCE."""
    close(got.loss, wanted.loss, "loss")
    assert got.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        close(got.gradients[name], gradient, name)


def logits_of(model):
    batch = packed()
    del batch["labels"]
    return model(**batch).logits


def state_of(model):
    """The attributes and hooks of a model that a context may change, by identity."""
    return [
        (
            {name: id(x) for name, x in module.__dict__.items() if name[0] != "_" or name == "_loss_function"},
            [(*item, getattr(item[1], "deferred", None)) for item in module._forward_pre_hooks.items()],
            list(module._forward_hooks.items()),
        )
        for module in model.modules()
    ] + [getattr(getattr(model, "config", None), "_attn_implementation", None)]
