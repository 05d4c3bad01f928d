"""Losses, gradients and outputs of ranks that share batches equal those of one process: a table and its runner."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parallel import models
from tests.parallel.attention_cases import EXCHANGES, LAYOUTS
from tests.parallel.models import BATCHES, TOLERANCE, alone, close, loss_of, make_model, mesh_of, on_ranks, packed, same
from tritonpack import SequenceParallel, UnsupportedModelError, patch
from tritonpack.patches.parse_inputs import CACHES

PAIR = ("group_cast", "ulysses")
KEYS = ("all_gather", "group_cast", "ring")
# Every type with recurrences or convolutions whose attention ranks can share.
RECURRENT = (
    "qwen3_next", "mamba2", "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "recurrent_gemma", "rwkv", "zamba", "zamba2", "zaya",
)  # fmt: skip
# With a load-balancing loss in each form: coefficients of two names, hybrids, and text configurations.
EXPERTS = (
    "mixtral", "jetmoe", "jamba", "qwen3_next", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe",
    "granitemoeshared", "granitemoe_swa", "granitemoehybrid", "minimax", "minimax_m2", "ernie4_5_moe", "flex_olmo",
    "mellum", "laguna", "phimoe", "dbrx", "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip


def agrees(model="llama", *batches, compute=loss_of, make=None, zoo=False, prepare=lambda model: None, **options):
    """Compare a model on ranks with the same model in one process.

    Args:
        model: a family of models.SPECIFIC, or a type of the zoo; `zoo` takes the zoo's model of a family, too.
        batches: batches, or names of BATCHES; by default "packed".
        compute: (model, **batch) -> loss.
        make: makes the model in another way.
        prepare: changes the model on ranks.
        options: of the context; a pair of exchanges is for a mesh of two dimensions. And the `tolerance`.
    """
    tolerance = options.pop("tolerance", TOLERANCE)
    exact = not zoo and (make is not None or model in models.SPECIFIC)
    make = make or partial(make_model if exact else models.make_zoo_model, model)
    given = [BATCHES[one]() if isinstance(one, str) else one for one in batches or ("packed",)]
    if not isinstance(options.get("exchange", ""), str):
        options.setdefault("group", mesh_of(2, 2))
    with nullcontext() if exact else models.in_float64():
        wanted = alone(make(), compute, *given)
        shared = make()
        prepare(shared)
        same(on_ranks(shared, compute, *given, **options), wanted, tolerance)


def in_layers(name, batch="several", **more):
    """`agrees` for a model whose layers mix along the row."""
    given = (models.SHORT_DOCUMENTS.get(batch) or BATCHES[batch])()
    agrees(name, {**given, "use_cache": False}, **more)


def loss_with_routers(model, **batch):
    output = model(**batch, output_router_logits=True)
    assert output.aux_loss > 0
    assert [len(x) for x in output.router_logits] == [output.logits[..., 0].numel()] * len(output.router_logits)
    return output.loss if batch["labels"] is not None else output.aux_loss


def with_routers(name, batch="packed", **changes):
    agrees(name, {**BATCHES[batch](), "use_cache": False, **changes}, compute=loss_with_routers, zoo=True)


def hidden_states(model, labels, **batch):
    """A loss from the outputs of a base model, by itself or under its head."""
    states = getattr(model, "model", model)(**batch).last_hidden_state
    assert states.shape[:2] == labels.shape
    return states.square().mean()


def checkpoints(model, **options):
    model.train().gradient_checkpointing_enable(options)


def peft_model():
    """PEFT passes all arguments that it knows, most of them None. Only its own weights get gradients."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    weights = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(make_model(), weights)


def loss_by_total(shape=None, exchange="auto"):
    """Each rank computes the terms of its own tokens, and `total` sums them."""
    model, batch = make_model(), packed()
    targets = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    with SequenceParallel(model, mesh_of(*shape) if shape else None, exchange=exchange, layout="stripe") as context:
        logits = model(**batch).logits
        terms = torch.nn.functional.cross_entropy(logits[0], context.shard(targets, fill=-100)[0], reduction="sum")
        loss = context.total(terms) / (targets != -100).sum()
        loss.backward()
    result = models.Result(loss.detach()[None], models.mean_over(None, models.gradients_of(model)))
    same(result, alone(make_model(), loss_of, packed()))


def outputs(batch, **options):
    """Logits and hidden states equal those of one process with `gather_outputs`, else this rank's rows of them."""
    model, reference, given = make_model(), make_model(), BATCHES[batch]()
    patch(reference)
    wanted = reference(**given, output_hidden_states=True)
    with SequenceParallel(model, gather_outputs=True, **options):
        got = model(**given, output_hidden_states=True)
        loss, logits = model(**given, return_dict=False)[:2]
    assert got.keys() == wanted.keys() - {*CACHES}
    close(loss, wanted.loss, "loss in a tuple")
    states = zip(got.hidden_states, wanted.hidden_states, strict=True)
    for ours, theirs in ((got.logits, wanted.logits), (logits, wanted.logits), *states):
        close(ours, theirs, "logits and hidden states")
    with SequenceParallel(model, **options) as context:
        mine = model(**given).logits
        close(mine, context.shard(wanted.logits), "own logits")
        close(context.gather(mine), wanted.logits, "gathered logits")


def documents_stay_apart(exchange, layout):
    """Changing the tokens of one document changes no bit of another document's logits."""
    batch, model = packed(), make_model().eval()
    del batch["labels"]
    with SequenceParallel(model, exchange=exchange, layout=layout, gather_outputs=True), torch.no_grad():
        before, documents = model(**batch).logits, (batch["position_ids"][0] == 0).cumsum(0)
        for document in range(1, len(models.LENGTHS) + 1):
            changed = torch.where(documents == document, 3 + (batch["input_ids"] + 1) % 50, batch["input_ids"])
            moved = (model(**{**batch, "input_ids": changed}).logits != before).any(-1)[0]
            assert set(documents[moved].tolist()) == {document}


def in_groups_of_two(*shape):
    """Pairs of ranks along a dimension of a mesh share batches, also by two contexts, whose group is made once."""
    mesh = mesh_of(*shape)
    batches = [packed(seed=seed) for seed in range(mesh["dp"].size())]
    model, wanted = make_model(), alone(make_model(), loss_of, *batches)
    replica, groups = mesh.get_local_rank("dp"), set()
    for _ in range(2):
        model.zero_grad()
        with SequenceParallel(model, mesh["across", "within"], exchange=PAIR) as context:
            loss = loss_of(model, **batches[replica])
            loss.backward()
        groups.add(context.ranks.group)
    assert len(groups) == 1
    close(loss.detach(), wanted.loss[replica], "loss")
    for name, gradient in models.mean_over(None, models.gradients_of(model)).items():
        close(gradient, wanted.gradients[name] / len(batches), name)


def refuses_a_long_document():
    """Every rank raises, and the context goes on."""
    model, size = models.make_zoo_model("mamba2"), dist.get_world_size()
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=rf"has 40 of the batch's 45 tokens, .* on one of the {size} ranks\. "):
            model(**packed((2, 40, 3)))
        assert model(**models.SHORT_DOCUMENTS["several"]()).loss.isfinite()


def refuses_another_router_loss():
    from transformers.models.mixtral import modeling_mixtral

    model, own = models.make_zoo_model("mixtral"), modeling_mixtral.load_balancing_loss_func
    with (
        mock.patch.object(modeling_mixtral, "load_balancing_loss_func", lambda *given: 2 * own(*given)),
        SequenceParallel(model),
        pytest.raises(ValueError, match="MixtralForCausalLM computes another load-balancing loss"),
    ):
        model(**packed(), output_router_logits=True)
    model.num_experts_per_tok = None
    with SequenceParallel(model), pytest.raises(UnsupportedModelError, match="Pass output_router_logits=False"):
        model(**packed(), output_router_logits=True)


# Batches with different numbers of targets and one `num_items_in_batch`, as trainers pass it.
COUNTED = [{**one, "num_items_in_batch": torch.tensor(60)} for one in (packed(), packed((5, 30, 2), seed=4))]
FAMILIES = ("mistral", "gemma2", "gpt_oss")
OTHER_BATCHES = [name for name in BATCHES if name != "packed"]
CASES = {}
for exchange in (*EXCHANGES, *((keys, "ulysses") for keys in KEYS)):
    name = exchange if isinstance(exchange, str) else f"mesh, {exchange[0]}"
    CASES |= {f"{name}, {one}": partial(agrees, exchange=exchange, layout=one) for one in LAYOUTS}
    CASES |= {f"{name}, {one}": partial(agrees, "llama", one, exchange=exchange) for one in OTHER_BATCHES}
    CASES |= {f"{name}, {one}": partial(agrees, one, exchange=exchange) for one in FAMILIES}
    if isinstance(exchange, str):
        CASES[f"documents stay apart, {name}"] = partial(documents_stay_apart, exchange, "zigzag")
CASES |= {
    "accumulated gradients": lambda: agrees("llama", *COUNTED),
    "other ignore_index, padded layout": lambda: agrees("llama", models.other_ignored("three_tokens")),
    "targets on one rank": lambda: agrees("llama", models.one_target()),
    "checkpointed": partial(agrees, prepare=checkpoints),
    "checkpointed, ulysses": partial(agrees, prepare=checkpoints, exchange="ulysses"),
    "checkpointed, reentrant": partial(agrees, prepare=partial(checkpoints, use_reentrant=True)),
    "loss by total": loss_by_total,
    "base model": partial(agrees, compute=hidden_states, make=lambda: make_model().model, gather_outputs=True,
                          layout="zigzag"),
    "base model under a head": partial(agrees, compute=hidden_states, gather_outputs=True, layout="zigzag"),
    "patched with unpad": partial(agrees, "llama", "padded", prepare=partial(patch, unpad=True)),
    "patched with share_prefixes": partial(agrees, "llama", "padded", prepare=partial(patch, share_prefixes=True)),
    "PEFT model": partial(agrees, make=peft_model),
    "outputs": partial(outputs, "packed"),
    "outputs of two rows": partial(outputs, "padded", layout="zigzag", exchange="ring"),
    "mesh, ulysses first": partial(agrees, exchange=PAIR[::-1]),
    "mesh, loss by total": partial(loss_by_total, (2, 2), PAIR),
    "mesh, pairs along the second dimension": partial(in_groups_of_two, 2, 1, 2),
    "mesh, pairs along the first dimension": partial(in_groups_of_two, 2, 2, 1),
}  # fmt: skip
CASES |= {f"recurrent, {name}": partial(in_layers, name) for name in RECURRENT}
for name in ("qwen3_next", "mamba2", "minimax", "lfm2", "jamba", "rwkv"):
    CASES |= {
        f"recurrent, {name}, {one}": partial(in_layers, name, one) for one in ("two_rows", "padded", "few tokens")
    }
for name in ("qwen3_next", "mamba2", "minimax"):
    for exchange, layout in (("ring", "zigzag"), ("ring", "stripe"), ("group_cast", "documents"),
                             ("ulysses", "contiguous")):  # fmt: skip
        CASES[f"recurrent, {name}, {exchange} {layout}"] = partial(in_layers, name, exchange=exchange, layout=layout)
for name in ("qwen3_next", "mamba2", "mamba", "minimax", "rwkv"):
    CASES[f"recurrent, {name}, checkpoints"] = partial(in_layers, name, prepare=checkpoints)
CASES |= {f"mesh, {name}": partial(in_layers, name, exchange=PAIR) for name in ("qwen3_next", "mamba2")}
CASES["recurrent, a long document"] = refuses_a_long_document
CASES |= {f"experts, {name}": partial(with_routers, name) for name in EXPERTS}
CASES |= {
    **{f"experts, mixtral, {one}": partial(with_routers, "mixtral", one) for one in BATCHES if one != "embeddings"},
    "experts, without labels": partial(with_routers, "mixtral", labels=None),
    "experts, another loss": refuses_another_router_loss,
}

# One of each kind; these depend on the number of ranks.
ALSO_ON_FOUR = [
    *(f"{exchange}, {layout}" for exchange in EXCHANGES for layout in LAYOUTS),
    *(f"all_gather, {batch}" for batch in OTHER_BATCHES),
    *("ring, two_rows", "ring, three_tokens", "ulysses, padded", "ulysses, three_tokens"),
    *("ring, mistral", "all_gather, gemma2", "ulysses, gpt_oss"),
    *("accumulated gradients", "checkpointed", "targets on one rank", "loss by total"),
    *("outputs of two rows", "documents stay apart, ring"),
]
