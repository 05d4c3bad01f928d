"""Models with experts: the load-balancing loss of ranks, and its gradients, equal those of one process to 1e-12."""

from functools import partial
from unittest import mock

import pytest
from transformers.models.mixtral import modeling_mixtral

from tests.parallel.models import (
    alone,
    close,
    gradients_of,
    mean_over,
    on_ranks,
    packed,
    padded,
    three_tokens,
    two_rows,
)
from tests.parallel.recurrent_cases import TOLERANCE, in_float64, make, require_equal
from tritonpack import SequenceParallel, UnsupportedModelError, patch

# A type with each form of the sum: coefficients of two names, hybrids, and text configurations.
TYPES = (
    "mixtral", "jetmoe", "jamba", "qwen3_next", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe",
    "granitemoeshared", "granitemoe_swa", "granitemoehybrid", "minimax", "minimax_m2", "ernie4_5_moe", "flex_olmo",
    "mellum", "laguna", "phimoe", "dbrx", "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip
WEIGHT = 0.5  # of the load-balancing loss


def make_router_model(name):
    model = make(name)
    for home in (model, model.config.get_text_config()):
        for setting in ("router_aux_loss_coef", "aux_loss_coef"):
            if hasattr(home, setting):
                setattr(home, setting, WEIGHT)
    return model


def loss_with_routers(model, **batch):
    output = model(**batch, output_router_logits=True)
    assert output.aux_loss > 0
    return output.loss


def agrees(name, batch=packed, **options):
    model, other = make_router_model(name), make_router_model(name)
    given = {**batch(), "use_cache": False}
    with in_float64():
        wanted = alone(model, loss_with_routers, given)
        without = model(**given).loss.detach()
        assert (wanted.loss - without).abs() > 0.1, "the load-balancing loss doesn't count"
        require_equal(on_ranks(other, loss_with_routers, given, **options), wanted)


def without_labels():
    """`aux_loss` by itself, from a configuration that asks for it, and its gradients."""
    model, other = make_router_model("mixtral"), make_router_model("mixtral")
    batch = padded()
    del batch["labels"]
    for one in (model, other):
        one.config.output_router_logits = True
    with in_float64():
        patch(model)
        wanted = model(**batch).aux_loss
        wanted.backward()
        with SequenceParallel(other, gather_outputs=True):
            output = other(**batch)
            output.aux_loss.backward()
        close(output.aux_loss.detach(), wanted.detach(), "aux_loss", TOLERANCE)
        assert [x.shape[0] for x in output.router_logits] == [4 * 15] * len(output.router_logits)
        gradients = gradients_of(model)
        for key, gradient in mean_over(None, gradients_of(other)).items():
            close(gradient, gradients[key], key, 1e-11)


def another_loss():
    model = make_router_model("mixtral")
    model.num_experts_per_tok = None
    with SequenceParallel(model), pytest.raises(UnsupportedModelError, match="Pass output_router_logits=False"):
        model(**packed(), output_router_logits=True)
    own = modeling_mixtral.load_balancing_loss_func

    def doubled(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        return 2 * own(gate_logits, num_experts, top_k, attention_mask)

    model = make_router_model("mixtral")
    replacing = mock.patch.object(modeling_mixtral, "load_balancing_loss_func", doubled)
    raising = pytest.raises(ValueError, match="MixtralForCausalLM computes another load-balancing loss")
    with replacing, SequenceParallel(model), raising:
        model(**packed(), output_router_logits=True)


CASES = {name: partial(agrees, name) for name in TYPES}
CASES |= {f"mixtral, {f.__name__}": partial(agrees, "mixtral", f) for f in (two_rows, padded, three_tokens)}
CASES |= {
    "mixtral, summed": partial(agrees, "mixtral", grad_reduce="sum"),
    "without labels": without_labels,
    "another loss": another_loss,
}
