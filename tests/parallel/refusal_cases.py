"""Arguments, models, calls and differing batches that SequenceParallel refuses, on every rank and without a hang."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from tests.parallel.models import (
    alone,
    close,
    exact_loss,
    gradients_of,
    logits_of,
    loss_of,
    make_model,
    mean_over,
    numbers,
    on_ranks,
    packed,
    padded,
    same,
    state_of,
    two_rows,
)
from tests.patches.models import COMMON
from tritonpack import SequenceParallel, UnsupportedModelError, patch, unpatch

TOKENS = 51  # of `packed()`
TORN = torch.ones(1, TOKENS, dtype=torch.long)  # padding inside a document
TORN[0, 20] = 0


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def without(*names):
    return lambda batch: {name: x for name, x in batch.items() if name not in names}


def replaced(**changes):
    return lambda batch: batch | changes


def refused_on_entry(message, make=make_model, error=ValueError, **options):
    """The context raises on entry, and the models stay unchanged."""
    given = make()
    models = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, nn.Module)]
    before = [state_of(one) for one in models]
    with pytest.raises(error, match=message), SequenceParallel(given, **options):
        raise AssertionError("entered")
    assert before == [state_of(one) for one in models]


def refused_group(message, group):
    with pytest.raises(ValueError, match=message):
        SequenceParallel(make_model(), group)


def refused_call(message, change, make=make_model, error=ValueError, **options):
    model = make()
    with SequenceParallel(model, **options), pytest.raises(error, match=message):
        model(**change(packed()))


def differs(message, change=lambda batch: batch, training=True):
    """The last rank passes another batch than the others: an error on every rank."""
    model, batch = make_model(), packed()
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=message), torch.set_grad_enabled(training or not is_last()):
            model(**(change(batch) if is_last() else batch))
        assert model(**batch).loss.isfinite()  # the group still works


def error_on_the_last_rank(message, change):
    """That rank raises its own error, and the others name it."""
    differs(message if is_last() else rf"(?s)other ranks .* rank {dist.get_world_size() - 1}: .*{message}", change)


def error_on_the_last_rank_of_a_base_model():
    base = make_model().model
    with SequenceParallel(base):
        with pytest.raises(ValueError, match="has padding inside a document"):
            base(input_ids=numbers(1, TOKENS), **({"attention_mask": TORN} if is_last() else {}))
        assert base(input_ids=numbers(1, TOKENS)).last_hidden_state.isfinite().all()


def arguments_that_differ_are_named():
    """Arguments that one rank alone passes, or passes with another value."""
    model, items = make_model(), torch.tensor(40 + is_last())
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=r"different batches: num_items_in_batch differs from rank to rank"):
            model(**packed(), num_items_in_batch=items)
        more = {"output_hidden_states": True} if is_last() else {}
        with pytest.raises(ValueError, match=r"num_items_in_batch, output_hidden_states differ from rank to rank"):
            model(**packed(), num_items_in_batch=items, **more)
        with pytest.raises(ValueError, match="output_hidden_states, return_dict differ"):
            model(**packed(), output_hidden_states=is_last(), return_dict=not is_last())
        assert model(**packed(), num_items_in_batch=40).loss.isfinite()  # the group still works


def calls_that_differ_are_named():
    """What decides which exchanges a rank makes, beside the arguments."""
    model, other = make_model(), make_model()
    with SequenceParallel([model, other]):
        with pytest.raises(ValueError, match="batches: the model that is called differs"):
            (other if is_last() else model)(**packed())
        with torch.autocast("cpu", enabled=is_last()), pytest.raises(ValueError, match="batches: autocast differs"):
            model(**packed())
        if is_last():
            model.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="batches: gradient checkpointing differs"):
            model(**packed())
        model.gradient_checkpointing_disable()
        embeddings = model.get_input_embeddings()(packed()["input_ids"]).detach().requires_grad_(is_last())
        with pytest.raises(ValueError, match="batches: inputs_embeds differs"):
            model(inputs_embeds=embeddings, position_ids=packed()["position_ids"])
        assert model(**packed()).loss.isfinite()


def settings_differ():
    model = make_model()
    before = model.config.rms_norm_eps
    model.config.rms_norm_eps = 1e-3 if is_last() else before
    with pytest.raises(ValueError, match=r"config.rms_norm_eps of model 0 must be the same on every rank"):
        SequenceParallel(model).__enter__()
    model.config.rms_norm_eps = before
    layout = "zigzag" if dist.get_rank() == 0 else "stripe"
    with pytest.raises(ValueError, match=r"layout must be the same on every rank.*'zigzag', 'stripe'"):
        SequenceParallel(model, layout=layout).__enter__()
    others = f"other ranks.*rank {dist.get_world_size() - 1}: ValueError: exchange must"
    with pytest.raises(ValueError, match="exchange must be one of" if is_last() else others):
        SequenceParallel(model, exchange="p2p" if is_last() else "ring").__enter__()
    assert "forward" not in model.__dict__


def rank_outside_of_the_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        with SequenceParallel(make_model(), group, gather_outputs=True) as context:
            assert logits_of(context.models[0]).shape[1] == TOKENS
    else:
        refused_group(rf"rank {dist.get_rank()} of the world, isn't in the group", group)


def parameters_began_differently():
    """One matrix differs: before the first forward all are compared, later ones in turn."""
    model = make_model()
    weight = max(model.parameters(), key=torch.Tensor.numel)
    before = weight.detach().clone()
    with SequenceParallel(model):
        with torch.no_grad():
            weight.mul_(1.5 if is_last() else 1.0)
        with pytest.raises(ValueError, match=r"parameters differ between the ranks.*began with different values"):
            model(**packed())
        with torch.no_grad():
            weight.copy_(before)
        model(**packed())
        with torch.no_grad():
            weight.mul_(1.5 if is_last() else 1.0)
        calls = (model(**packed()) for _ in model.parameters())
        with pytest.raises(ValueError, match="parameters differ between the ranks"):
            list(calls)


def parameters_have_come_apart():
    """A step without reduced gradients makes parameters differ; the next forward raises on every rank."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SequenceParallel(model):
        for _ in range(2):  # correct steps
            optimizer.zero_grad()
            model(**packed()).loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            optimizer.step()
        model(**packed()).loss.backward()
        optimizer.step()
        with pytest.raises(ValueError, match=r"parameters differ between the ranks.*weren't reduced"):
            model(**packed())


def unpatched_inside():
    model = make_model()
    with SequenceParallel(model):
        unpatch(model)
        with pytest.raises(ValueError, match="unpatched inside of SequenceParallel"):
            model(**packed())


def patched_again_inside():
    """The forward that shards would stand below the new patch."""
    model = make_model()
    with SequenceParallel(model):
        wanted, before = logits_of(model), state_of(model)
        with pytest.raises(ValueError, match=r"inside of SequenceParallel, .* Leave the context, call patch"):
            patch(model, unpad=True)
        assert state_of(model) == before
        close(logits_of(model), wanted, "with the patch of the context")


def unchecked_batches():
    """Without comparison results are the same, and a rank still refuses its own batch."""
    model = make_model()
    with SequenceParallel(model):
        wanted = model(**packed()).loss
    with SequenceParallel(model, check_batches=False):
        close(model(**packed()).loss, wanted, "loss")
        with pytest.raises(ValueError, match="at least one token"):
            model(input_ids=numbers(1, 0))


def misused_context():
    model = make_model()
    context = SequenceParallel(model)
    for call in (context.shard, context.gather, context.total):
        with pytest.raises(ValueError, match="no batch has been shared yet"):
            call(torch.zeros(1, 1))
    with context, pytest.raises(ValueError, match="entered already"):
        context.__enter__()
    with context:  # once more after leaving
        logits_of(model)
        with pytest.raises(ValueError, match=r"tokens of shape \(1, 51\).*got shape \(1, 50\)"):
            context.shard(torch.zeros(1, 50))
        with pytest.raises(ValueError, match=r"its shard must be \(1, \d+, ...\); got shape \(1, 51\)"):
            context.gather(torch.zeros(1, TOKENS))


def loss_without_a_loss_function():
    """A masked model computes its loss itself: refused with labels, exact without."""
    batch = padded()
    labels = batch.pop("labels")
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model("roberta", **COMMON)).double().eval()
    with patch(model):
        wanted = model(**batch).logits
    with SequenceParallel(model, gather_outputs=True):
        close(model(**batch).logits, wanted, "logits")
        message = "RobertaForMaskedLM computes its loss without its loss function"
        with pytest.raises(UnsupportedModelError, match=message):
            model(**batch, labels=labels)
    with SequenceParallel(model), pytest.raises(UnsupportedModelError, match=f"{message}.*gather_outputs=True"):
        model(**batch, labels=labels)


def remedy_for_a_loss_function():
    """The remedy doesn't name what is passed already."""
    for gathers in (False, True):
        with SequenceParallel(with_its_own_loss(), gather_outputs=gathers) as context:
            with pytest.raises(UnsupportedModelError, match=r"must take shift_labels.*Pass no labels") as error:
                context.models[0](**packed())
            assert "gather_outputs" in str(error.value)


class OwnHead(nn.Module):
    """A head around a base model, with a loss of its own."""

    def __init__(self, model):
        super().__init__()
        self.base, self.project = model.model, model.lm_head

    def forward(self, *, labels, **batch):
        return exact_loss(self.project(self.base(**batch).last_hidden_state), labels, None)


def own_head(model):
    head = OwnHead(model)
    return head, head


def head_of_transformers(model):
    return model.model, lambda **batch: model(**batch).loss


def forward_from_before(model):
    forward = model.forward
    return model, lambda **batch: forward(**batch).loss


def ignore_model(loss, _, **batch):
    return loss(**batch)


def outside_of_the_given_model(make):
    """A head or a loss there gets this rank's rows, and torch refuses them; with gather_outputs it is exact."""
    for batch in (packed(), two_rows()):
        given, loss = make(make_model())
        with pytest.raises(ValueError, match=r"(?s)to match.* this rank's rows, .*gather_outputs=True.*context.shard"):
            on_ranks(given, partial(ignore_model, loss), batch)
        model = make_model()
        given, loss = make(model)
        got = on_ranks(given, partial(ignore_model, loss), batch, gather_outputs=True)
        got.gradients = mean_over(None, gradients_of(model))
        same(got, alone(make_model(), loss_of, batch))


def fewer_heads_than_ranks():
    model = make_model("llama", num_attention_heads=dist.get_world_size() // 2, num_key_value_heads=1)
    with SequenceParallel(model, exchange="ulysses"), pytest.raises(ValueError, match="gives every rank a query head"):
        model(**packed())


def from_config(family, **overrides):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON | overrides))


def sequence_classifier():
    return LlamaForSequenceClassification(AutoConfig.for_model("llama", **COMMON))


def gpt_neo():
    return from_config("gpt_neo", num_layers=2, num_heads=2, attention_types=[[["global"], 2]])


def with_its_own_loss():
    model = make_model()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean()
    return model


def patched_for_sdpa():
    model = make_model()
    patch(model, attention="sdpa")
    return model


ENTRIES = {
    "a trainer as model": (
        r"got a SimpleNamespace, which holds a model; pass that model, its attribute .model",
        lambda: SimpleNamespace(model=make_model()),
    ),
    "None as model": (r"expected a model, an instance of torch.nn.Module; got None of type", lambda: None),
    "name as model": (r"got the name 'gpt2'; load it first", lambda: "gpt2"),
    "class as model": (r"got the class LlamaForCausalLM; make a model of it first", lambda: LlamaForCausalLM),
    "configuration as model": (r"got a LlamaConfig; make a model of it first", LlamaConfig),
    "number as model": (r"got 3 of type int", lambda: 3),
    "no models": (r"expected a model, or several; got \[\]", list),
    "name among models": (r"got the name 'gpt2'", lambda: [make_model(), "gpt2"]),
}
SETTINGS = {
    "check_batches": ("check_batches must be True or False; got str 'x'", {"check_batches": "x"}),
    "gather_outputs": ("gather_outputs must be True or False; got str 'no'", {"gather_outputs": "no"}),
    "unknown reduction": ("grad_reduce must be one of 'mean', 'sum'; got 'avg'", {"grad_reduce": "avg"}),
    "unknown layout": ("layout must be one of 'contiguous'.*got 'greedy'", {"layout": "greedy"}),
    "unknown exchange": (
        "exchange must be one of 'auto', 'all_gather', 'group_cast', 'ring', 'ulysses', .*'p2p'", {"exchange": "p2p"}
    ),
    "list of exchanges": (r"exchange must be one of .* got \['ring'\]", {"exchange": ["ring"]}),
    "axolotl's name": (
        "'batch_zigzag'. This name of axolotl's stands for exchange='ring' with layout='zigzag'",
        {"exchange": "batch_zigzag"},
    ),
}  # fmt: skip
MODELS = {
    "no transformers model": ("expected a transformers model; got Linear", lambda: nn.Linear(2, 2)),
    "dense attention": ("'gpt_neo' attends by 'dense'", gpt_neo),
    "transformers' attention": ("attends by 'sdpa'", patched_for_sdpa),
    "sequence classifier": ("LlamaForSequenceClassification reads one token", sequence_classifier),
    "second of two models": ("MultiHeadAttention", lambda: [make_model(), from_config("xlm")]),
}
GROUPS = {
    "name as group": (r"group must be a process group.* got str 'sp'.*mesh\['sp'\]", "sp"),
    "number as group": (r"group must be .* got int 3", 3),
    "list as group": (r"group must be .* got list \[0\].*new_group\(ranks\)", [0]),
}
CALLS = {
    "no tokens": (r"at least one token; got tokens of shape \(1, 0\)", lambda _: {"input_ids": numbers(1, 0)}),
    "neither ids nor embeddings": ("either input_ids or inputs_embeds", without("input_ids")),
    "use_cache": ("without a cache", replaced(use_cache=True)),
    "4-D mask": (
        "attention_mask must be two-dimensional", replaced(attention_mask=torch.zeros(1, 1, TOKENS, TOKENS))
    ),
    "mask that counts from 0": (
        r"is padding, by the number 0\..*pass attention_mask \+ 1",
        lambda batch: {**batch, "attention_mask": (batch["position_ids"] == 0).cumsum(1) - 1},
    ),
    "labels of another shape": (
        r"labels must have the shape.*\(1, 51\); got \(1, 50\)", replaced(labels=numbers(1, 50))
    ),
    "kept logits": ("logits_to_keep names tokens of whole rows.*Leave it out", replaced(logits_to_keep=3)),
}  # fmt: skip
UNSUPPORTED_CALLS = {
    "images": (r"pixel_values has shape \(1, 3, 8, 8\)", replaced(pixel_values=torch.zeros(1, 3, 8, 8)), make_model),
    "loss function without targets": ("must take shift_labels", lambda batch: batch, with_its_own_loss),
}  # fmt: skip
DIFFERENCES = {
    "other tokens": ("different batches: input_ids differs", replaced(input_ids=numbers(1, TOKENS, seed=9))),
    "other order": ("input_ids differs", lambda batch: batch | {"input_ids": batch["input_ids"].flip(1)}),
    "other labels": ("labels differs", replaced(labels=numbers(1, TOKENS, seed=9))),
    "other documents": ("position_ids differs", replaced(position_ids=torch.arange(TOKENS)[None])),
    "other lengths": (
        "input_ids, position_ids, labels differ", lambda batch: {name: x[:, :40] for name, x in batch.items()}
    ),
}  # fmt: skip

CASES = {
    **{name: partial(refused_on_entry, message, make) for name, (message, make) in ENTRIES.items()},
    **{name: partial(refused_on_entry, message, **options) for name, (message, options) in SETTINGS.items()},
    **{
        name: partial(refused_on_entry, message, make, UnsupportedModelError)
        for name, (message, make) in MODELS.items()
    },
    **{name: partial(refused_group, message, group) for name, (message, group) in GROUPS.items()},
    **{name: partial(refused_call, message, change) for name, (message, change) in CALLS.items()},
    **{
        name: partial(refused_call, message, change, make, UnsupportedModelError)
        for name, (message, change, make) in UNSUPPORTED_CALLS.items()
    },
    **{name: partial(differs, message, change) for name, (message, change) in DIFFERENCES.items()},
    "no gradients on one rank": partial(differs, "whether gradients are computed differs", training=False),
    "no tokens on one rank": partial(error_on_the_last_rank, "at least one token", replaced(input_ids=numbers(1, 0))),
    "torn document on one rank": partial(
        error_on_the_last_rank,
        "has padding inside a document",
        lambda batch: {"input_ids": batch["input_ids"], "attention_mask": TORN},
    ),
}
CASES |= {
    case.__name__.replace("_", " "): partial(outside_of_the_given_model, case)
    for case in (own_head, head_of_transformers, forward_from_before)
}
CASES |= {
    case.__name__.replace("_", " "): case
    for case in (
        error_on_the_last_rank_of_a_base_model,
        arguments_that_differ_are_named,
        calls_that_differ_are_named,
        settings_differ,
        rank_outside_of_the_group,
        parameters_began_differently,
        parameters_have_come_apart,
        unpatched_inside,
        patched_again_inside,
        unchecked_batches,
        misused_context,
        loss_without_a_loss_function,
        remedy_for_a_loss_function,
        fewer_heads_than_ranks,
    )
}

# The rank at fault and the ranks that name it differ with the number of ranks.
ALSO_ON_FOUR = [
    *("arguments that differ are named", "fewer heads than ranks", "other tokens", "other lengths"),
    *("no tokens on one rank", "settings differ", "rank outside of the group", "parameters have come apart"),
]
