"""The load-balancing loss of routers of experts over the tokens of all ranks.

For E experts, n tokens, the number N_e of tokens that chose expert e, and the sum P_e of its probabilities, it is
E sum_e (N_e / n) (P_e / n). So N, P and n are summed over ranks before they are multiplied.

Source: Fedus et al., Switch Transformers (arXiv:2101.03961), equations 4 to 6, as in transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tritonpack.checks import require
from tritonpack.errors import UnsupportedModelError
from tritonpack.parallel.masks import ShardedBatch

FUNCTION = "load_balancing_loss_func"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # names, of which a model has one
CLOSE = 1e-2  # in half precision; another loss differs more


def require_known_loss(module: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model whose load-balancing loss lacks a setting."""
    # A base model only returns the logits of routers.
    has_loss = hasattr(sys.modules[type(module).__module__], FUNCTION) and module.get_output_embeddings() is not None
    if has_loss and None in (_setting(module, "num_experts_per_tok"), _setting(module, *COEFFICIENTS)):
        raise UnsupportedModelError(
            f"{type(module).__name__} computes a loss of its routers that isn't known to be a sum over tokens, and "
            "each rank has only some of them. Pass output_router_logits=False."
        )


def with_router_loss(output: Any, module: PreTrainedModel, batch: ShardedBatch, loss: Tensor | None) -> None:
    """Replace the load-balancing loss of one rank's tokens in a model's output by the loss of all ranks' tokens.

    Args:
        output: of the model, with `router_logits` and `aux_loss`, and `loss` if there are labels.
        module: the model.
        batch: this rank's rows.
        loss: the loss of the labels of all ranks, 0-dim; None without labels.
    """
    of_rank = output.get("aux_loss")
    if not isinstance(of_rank, Tensor):
        return
    live = batch.sharding.take(batch.whole.not_padding())[0]
    sums = _sums(output.router_logits, _setting(module, "num_experts_per_tok"), live)
    expected, found = _balancing_loss(sums.detach()), of_rank.detach()
    require(
        ((expected - found).abs() <= CLOSE * found.abs()) | (sums[-1] == 0),
        f"{type(module).__name__} computes another load-balancing loss than transformers' "
        f"{FUNCTION}. Pass output_router_logits=False.",
    )
    of_all = _balancing_loss(batch.sharding.total(sums)).to(of_rank.dtype)
    output["aux_loss"] = of_all
    if loss is not None:
        output["loss"] = loss + _setting(module, *COEFFICIENTS) * of_all.to(loss.device)


def _sums(logits: tuple[Tensor, ...], top_k: int, live: Tensor) -> Tensor:
    """(2 E + 1,): for each of E experts how many tokens chose it, then its probabilities, then the number of tokens.

    All are sums over layers, whose `logits` are (rows, E) each, and over the `live` tokens, which aren't padding.
    """
    device, dtype = logits[0].device, torch.promote_types(logits[0].dtype, torch.float32)
    weight, sums = live.to(device, dtype), []
    for layer in logits:
        routing = nn.functional.softmax(layer.to(device), dim=-1)
        chosen = torch.zeros_like(routing, dtype=dtype).scatter(1, routing.topk(top_k, dim=-1).indices, 1.0)
        sums.append(torch.cat([weight @ chosen, weight @ routing.to(dtype), weight.sum()[None]]))
    return torch.stack(sums).sum(0)


def _balancing_loss(sums: Tensor) -> Tensor:
    """The load-balancing loss of `_sums`, 0-dim."""
    experts = (sums.shape[0] - 1) // 2
    chosen, probabilities = (sums[:-1] / sums[-1]).split(experts)
    return experts * (chosen * probabilities).sum()


def _setting(module: PreTrainedModel, *names: str) -> Any:
    """A setting of a model, or of its text configuration, under the first of these names that it has."""
    homes = (module, module.config.get_text_config())
    return next((getattr(home, name) for home in homes for name in names if hasattr(home, name)), None)
