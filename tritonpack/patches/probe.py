"""The probe of models that aren't known: tiny documents packed against each alone, and one of them changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonpack.errors import UnsupportedModelError
from tritonpack.patches.tokens import special_tokens

LENGTHS = (5, 1, 7)


def probe_alone(model: nn.Module) -> Tensor:
    """What the model makes of each document by itself, before it is patched: (1, tokens, n).

    Raises:
        UnsupportedModelError: the model can't be run as it is.
    """
    unknown = f"{type(model).__name__} isn't a model that tritonpack knows"
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"{unknown}, and its weights are on the meta device; patch it once they are loaded."
        )
    try:
        with as_found(model), torch.no_grad():
            return torch.cat([_run(model, ids, None) for ids in _documents(model)], dim=1)
    except Exception as error:
        raise UnsupportedModelError(
            f"{unknown}, and it can't be tried on a few tokens to see whether packed documents stay apart "
            f"({type(error).__name__}: {error}). Patch it before it is sharded, or as a causal language model."
        ) from error


def probe_packed(model: nn.Module, alone: Tensor) -> None:
    """Compare the patched model's packed documents with `alone`.

    Raises:
        UnsupportedModelError: they differ, or a document moves another one's.
    """
    documents = _documents(model)
    ids = torch.cat(documents, dim=1)
    places = _places(LENGTHS, ids)
    others = list(documents)
    others[0] = documents[0].flip(1)
    finfo = torch.finfo(torch.float32 if alone.dtype == torch.float64 else alone.dtype)  # norms compute in float32
    try:
        with as_found(model), torch.no_grad():
            packed = _run(model, ids, places)
            by_offsets = _run_by_offsets(model, ids, packed)
            moved = _run(model, torch.cat(others, dim=1), places)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} isn't a model that tritonpack knows, and it doesn't run when it is patched "
            f"({type(error).__name__}: {error})."
        ) from error
    if packed.shape != alone.shape or by_offsets.shape != alone.shape:
        raise UnsupportedModelError(
            f"{type(model).__name__} isn't a model that tritonpack knows, and it has no value for every token of a "
            f"row: {tuple(packed.shape)} of {ids.shape[1]} tokens."
        )
    scale = float(alone.abs().max())
    differs = max(float((x - alone).abs().max()) for x in (packed, by_offsets)) / scale
    moves = float((packed - moved)[:, LENGTHS[0] :].abs().max()) / scale
    if not (differs <= finfo.eps**0.5 and moves <= 64 * finfo.eps):
        raise UnsupportedModelError(
            f"{type(model).__name__} isn't a model that tritonpack knows, and on a few tokens its packed documents "
            f"don't stay apart: they differ from each alone by {differs:.1e} and move by {moves:.1e} when another one "
            f"changes ({finfo.eps**0.5:.1e} and {64 * finfo.eps:.1e} would be rounding)."
        )


def _documents(model: nn.Module) -> list[Tensor]:
    embed = model.get_input_embeddings()  # type: ignore[operator]
    special = special_tokens(model.config)
    ordinary = [i for i in range(min(embed.num_embeddings, 4096)) if i not in special]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.tensor(ordinary)[torch.randint(len(ordinary), (1, sum(LENGTHS)), generator=generator)]
    return list(chosen.to(embed.weight.device).split(list(LENGTHS), dim=1))


def _places(lengths: Any, like: Tensor) -> Tensor:
    return torch.cat([torch.arange(n, device=like.device) for n in lengths])[None]


def _run(model: nn.Module, ids: Tensor, places: Tensor | None) -> Tensor:
    told = {} if places is None else {"position_ids": places}
    return model(input_ids=ids, **told)[0].detach()


def _run_by_offsets(model: nn.Module, ids: Tensor, otherwise: Tensor) -> Tensor:
    """Told by offsets alone, as collators may; `otherwise` where the model doesn't take them."""
    parameters = inspect.signature(model.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "cu_seq_lens_q" not in parameters:
        return otherwise
    offsets = torch.tensor([0, *LENGTHS], device=ids.device).cumsum(0).to(torch.int32)
    return model(input_ids=ids, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)[0].detach()


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, with the modes and the random state restored afterwards."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module in training:
            module.training = True
