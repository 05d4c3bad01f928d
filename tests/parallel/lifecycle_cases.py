"""What ranks check of entering and leaving SequenceParallel, and of what it refuses: on every rank, never a hang."""

import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForSequenceClassification

from tests.parallel.models import GROUPED, close, make_model, numbers, packed, padded
from tests.patches.models import COMMON, tiny_model
from tritonpack import SequenceParallel, UnsupportedModelError, patch, unpatch


def state_of(model):
    """What a context may change of a model, by identity."""
    return [
        (
            {
                name: id(x)
                for name, x in module.__dict__.items()
                if not name.startswith("_") or name == "_loss_function"
            },
            list(module._forward_pre_hooks.items()),
            list(module._forward_hooks.items()),
        )
        for module in model.modules()
    ] + [model.config._attn_implementation]


def logits_of(model, **changes):
    batch = packed() | changes
    del batch["labels"]
    return model(**batch).logits


def restores(patched):
    model = make_model()
    if patched:
        patch(model, backend="blocked")
    before = state_of(model)
    with SequenceParallel(model):
        model(**packed()).loss.backward()
        assert state_of(model) != before
    assert state_of(model) == before
    with pytest.raises(KeyError, match="mine"), SequenceParallel(model):
        raise KeyError("mine")
    assert state_of(model) == before
    handle = model.model.layers[1].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="in a layer"), SequenceParallel(model):
        model(**packed())
    handle.remove()
    assert state_of(model) == before
    with pytest.raises(ValueError, match="exchange must be one of"), SequenceParallel(model, exchange="p2p"):
        raise AssertionError("entered")
    assert state_of(model) == before


def fails(*_):
    raise RuntimeError("in a layer")


def nests():
    """The innermost context counts, in whatever order they are left."""
    model = make_model()
    before, whole = state_of(model), packed()["input_ids"].shape[1]
    with SequenceParallel(model, layout="stripe") as outer:
        mine = logits_of(model)
        assert mine.shape[1] < whole
        model.eval()
        with SequenceParallel(model, exchange="ring", gather_outputs=True), torch.no_grad():
            gathered = logits_of(model)
            assert gathered.shape[1] == whole
        model.train()
        close(logits_of(model), mine, "after the inner one")
        close(outer.shard(gathered), mine, "own rows")
    assert state_of(model) == before

    handle = patch(model)
    patched = state_of(model)
    first, second = SequenceParallel(model), SequenceParallel(model, gather_outputs=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    close(logits_of(model), gathered, "the inner one alone")
    second.__exit__(None, None, None)
    assert state_of(model) == patched
    handle.unpatch()
    assert state_of(model) == before


def pauses():
    """Paused, every rank runs the whole batch by itself; models can generate."""
    model = make_model().eval()
    with SequenceParallel(model) as context:
        with context.paused():
            assert logits_of(model).shape[1] == packed()["input_ids"].shape[1]
            made = model.generate(numbers(1, 5), max_new_tokens=4, do_sample=False)
            assert made.shape == (1, 9)
        assert logits_of(model).shape[1] < packed()["input_ids"].shape[1]
        with pytest.raises(ValueError, match=r"without a cache.*paused"):
            model.generate(numbers(1, 5), max_new_tokens=4, do_sample=False)
        with SequenceParallel(model) as inner, inner.paused():
            assert logits_of(model).shape[1] == packed()["input_ids"].shape[1]
    base = make_model().model
    batch = {"input_ids": numbers(1, 51)}
    with SequenceParallel(base), SequenceParallel(base) as inner:
        with inner.paused():
            assert base(**batch).last_hidden_state.shape[1] == 51
        assert base(**batch).last_hidden_state.shape[1] < 51


def two_models():
    """A policy and a reference, in one context."""
    policy, reference = make_model(), make_model("mistral")
    wanted = []
    for model in (policy, reference):
        with patch(model):
            wanted.append(logits_of(model))
    with SequenceParallel([policy, reference], gather_outputs=True, exchange="ulysses"):
        for model, logits in zip((policy, reference), wanted, strict=True):
            close(logits_of(model), logits, type(model).__name__)


def copies():
    """A copy made inside is in the same context, and left alone outside of it."""
    model = make_model()
    with SequenceParallel(model):
        mine = logits_of(model)
        other = copy.deepcopy(model)
        close(logits_of(other), mine, "copy")
    assert logits_of(other).shape[1] == packed()["input_ids"].shape[1]


def forgets():
    """Nothing that a batch took waits for a garbage collection: no cycle of references holds its tensors."""
    model = make_model()
    with SequenceParallel(model, exchange="ring"):
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                model(**packed()).loss.backward()
                gc.collect()
                assert not [tuple(x.shape) for x in gc.garbage if isinstance(x, torch.Tensor)]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()


def without_a_head_or_its_own_loss():
    """A masked model computes its loss by itself: refused with labels, and right without."""
    batch = padded()
    labels = batch.pop("labels")
    config = AutoConfig.for_model("roberta", **COMMON)
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config).double().eval()
    with patch(model):
        wanted = model(**batch).logits
    with SequenceParallel(model, gather_outputs=True):
        close(model(**batch).logits, wanted, "logits")
        with pytest.raises(
            UnsupportedModelError, match="RobertaForMaskedLM computes its loss without its loss function"
        ):
            model(**batch, labels=labels)


def tables_of_positions():
    """Positions that a model looks up by counting its row's tokens."""
    batch = packed()
    del batch["labels"]
    for family in ("gpt2", "opt"):
        model = tiny_model(family, **GROUPED | {"ffn_dim": 48, "n_positions": 64, "word_embed_proj_dim": 32})
        with patch(model):
            wanted = model(**batch).logits
        with SequenceParallel(model, layout="zigzag", gather_outputs=True):
            close(model(**batch).logits, wanted, family)


def differs(message, change, training=True):
    """The last rank passes another batch than the others: an error on all."""
    model, batch = make_model(), packed()
    last = dist.get_rank() == dist.get_world_size() - 1
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=message), torch.set_grad_enabled(training or not last):
            model(**(change(batch) if last else batch))
        assert model(**batch).loss.isfinite()  # and the group still works


def differs_in_which_is_true():
    """Names and values are alike on all ranks, but not which belong together."""
    model, last = make_model(), dist.get_rank() == dist.get_world_size() - 1
    with SequenceParallel(model), pytest.raises(ValueError, match="output_hidden_states, return_dict differ"):
        model(**packed(), output_hidden_states=last, return_dict=not last)


def on_the_last_rank_alone(message, change):
    """What one rank refuses by itself is its own error there, and told on the others."""
    last = dist.get_rank() == dist.get_world_size() - 1
    size = dist.get_world_size()
    differs(message if last else rf"(?s)other ranks .* rank {size - 1}: .*{message}", change)


def forget(*names):
    return lambda batch: {name: x for name, x in batch.items() if name not in names}


def replace(**changes):
    return lambda batch: batch | changes


def refused_everywhere(message, change, family="llama", error=ValueError, **options):
    model = make_model(family) if isinstance(family, str) else family()
    with SequenceParallel(model, **options), pytest.raises(error, match=message):
        model(**change(packed()))


def refused_on_entry(message, make, error=ValueError, **options):
    model = make()
    models = model if isinstance(model, list) else [model]
    before = [state_of(one) for one in models if hasattr(one, "config")]
    with pytest.raises(error, match=message), SequenceParallel(model, **options):
        raise AssertionError("entered")
    assert before == [state_of(one) for one in models if hasattr(one, "config")]


def settings_differ():
    model = make_model()
    layout = "zigzag" if dist.get_rank() == 0 else "stripe"
    with pytest.raises(ValueError, match=r"layout must be the same on every rank.*'zigzag', 'stripe'"):
        SequenceParallel(model, layout=layout).__enter__()
    size = dist.get_world_size()
    broken = dist.get_rank() == size - 1
    message = "exchange must be one of" if broken else f"other ranks.*rank {size - 1}: ValueError: exchange must"
    with pytest.raises(ValueError, match=message):
        SequenceParallel(model, exchange="p2p" if broken else "ring").__enter__()
    assert "forward" not in model.__dict__


def not_in_the_group():
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        with SequenceParallel(make_model(), group, gather_outputs=True) as context:
            assert logits_of(context.models[0]).shape[1] == packed()["input_ids"].shape[1]
    else:
        with pytest.raises(ValueError, match=rf"rank {dist.get_rank()} of the world, isn't in the group"):
            SequenceParallel(make_model(), group)


def apart():
    """Gradients that nobody reduced move parameters apart: told at the next forward, on every rank."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SequenceParallel(model) as context:
        for _ in range(2):  # as it should be
            optimizer.zero_grad()
            model(**packed()).loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= context.ranks.size
            optimizer.step()
        model(**packed()).loss.backward()
        optimizer.step()
        with pytest.raises(ValueError, match=r"parameters differ between the ranks.*weren't reduced"):
            model(**packed())


def entered_twice():
    model = make_model()
    context = SequenceParallel(model)
    for call in (context.shard, context.gather, context.total):
        with pytest.raises(ValueError, match="no batch has been shared yet"):
            call(torch.zeros(1, 1))
    with context, pytest.raises(ValueError, match="entered already"):
        context.__enter__()
    with context:  # and again, when it has been left
        logits_of(model)
        with pytest.raises(ValueError, match=r"tokens of shape \(1, 51\).*got shape \(1, 50\)"):
            context.shard(torch.zeros(1, 50))
        with pytest.raises(ValueError, match=r"its shard must be \(1, \d+, ...\); got shape \(1, 51\)"):
            context.gather(torch.zeros(1, 51))


def unpatched_inside():
    model = make_model()
    with SequenceParallel(model):
        unpatch(model)
        with pytest.raises(ValueError, match="unpatched inside of SequenceParallel"):
            model(**packed())


def without_comparing():
    """Unchecked, nothing is compared and results are the same."""
    model = make_model()
    with SequenceParallel(model):
        wanted = model(**packed()).loss
    with SequenceParallel(model, check_batches=False):
        close(model(**packed()).loss, wanted, "loss")
        with pytest.raises(ValueError, match="at least one token"):
            model(input_ids=numbers(1, 0))


def few_heads():
    """One query head per rank is what Ulysses needs."""
    size = dist.get_world_size()
    model = make_model("llama", num_attention_heads=size // 2, num_key_value_heads=1)
    with SequenceParallel(model, exchange="ulysses"), pytest.raises(ValueError, match="gives every rank a query head"):
        model(**packed())


def sequence_classifier():
    config = AutoConfig.for_model("llama", **COMMON)
    return LlamaForSequenceClassification(config)


def from_config(family, **overrides):
    config = AutoConfig.for_model(family, **COMMON | overrides)
    return AutoModelForCausalLM.from_config(config)


def with_a_loss_of_its_own():
    model = make_model()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean()
    return model


def patched_for_sdpa():
    model = make_model()
    patch(model, attention="sdpa")
    return model


def rotary_embeddings_that_grow():
    """The longest document sets the frequencies of all ranks, also of those that have its beginning alone."""
    batch = {"input_ids": numbers(1, 40)}
    for family, rope in {
        "llama": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "phi3": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 24,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    }.items():
        more = {"original_max_position_embeddings": 24} if family == "phi3" else {}
        model = make_model(family, rope_parameters=rope, max_position_embeddings=24, **more)
        with patch(model):
            short, wanted = model(input_ids=numbers(1, 12)).logits, model(**batch).logits
        with SequenceParallel(model, layout="contiguous", gather_outputs=True):
            close(model(**batch).logits, wanted, rope["rope_type"])
            close(model(input_ids=numbers(1, 12)).logits, short, "short")
            with pytest.raises(ValueError, match="documents packed with a longer one"):
                logits_of(model)
        assert not model.model.rotary_emb._forward_hooks
        assert not model.model.rotary_emb._forward_pre_hooks


torn = torch.ones(1, 51, dtype=torch.long)
torn[0, 20] = 0

CASES = {
    "restores": partial(restores, False),
    "restores what was patched": partial(restores, True),
    "nests": nests,
    "pauses": pauses,
    "two models": two_models,
    "copies": copies,
    "forgets": forgets,
    "without its own loss": without_a_head_or_its_own_loss,
    "tables of positions": tables_of_positions,
    "other tokens": partial(differs, "different batches: input_ids differs", replace(input_ids=numbers(1, 51, seed=9))),
    "other order": partial(
        differs, "input_ids differs", lambda batch: batch | {"input_ids": batch["input_ids"].flip(1)}
    ),
    "other labels": partial(differs, "labels differs", replace(labels=numbers(1, 51, seed=9))),
    "other documents": partial(differs, "position_ids differs", replace(position_ids=torch.arange(51)[None])),
    "other lengths": partial(
        differs, "input_ids, position_ids, labels differ", lambda batch: {k: x[:, :40] for k, x in batch.items()}
    ),
    "other arguments": partial(differs, "output_hidden_states differs", replace(output_hidden_states=True)),
    "values of each other's arguments": differs_in_which_is_true,
    "no gradients": partial(differs, "whether gradients are computed differs", lambda batch: batch, training=False),
    "no tokens on one rank": partial(on_the_last_rank_alone, "at least one token", replace(input_ids=numbers(1, 0))),
    "torn on one rank": partial(
        on_the_last_rank_alone,
        "has padding inside a document",
        lambda b: forget("position_ids")(b) | {"attention_mask": torn},
    ),
    "no tokens": partial(
        refused_everywhere, r"at least one token; got tokens of shape \(1, 0\)", lambda _: {"input_ids": numbers(1, 0)}
    ),
    "neither ids nor embeddings": partial(refused_everywhere, "either input_ids or inputs_embeds", forget("input_ids")),
    "caches": partial(refused_everywhere, "without a cache", replace(use_cache=True)),
    "images": partial(
        refused_everywhere,
        r"pixel_values has shape \(1, 3, 8, 8\)",
        replace(pixel_values=torch.zeros(1, 3, 8, 8)),
        error=UnsupportedModelError,
    ),
    "made masks": partial(
        refused_everywhere, "attention_mask must be two-dimensional", replace(attention_mask=torch.zeros(1, 1, 51, 51))
    ),
    "labels of another shape": partial(
        refused_everywhere, r"labels must have the shape.*\(1, 51\); got \(1, 50\)", replace(labels=numbers(1, 50))
    ),
    "labels of kept logits": partial(
        refused_everywhere, r"\(1, 3\), so their targets.*Pass shift_labels", replace(logits_to_keep=3)
    ),
    "kept logits that aren't there": partial(
        refused_everywhere, "places in rows of 51 tokens", replace(logits_to_keep=torch.tensor([51]))
    ),
    "kept logits of no meaning": partial(
        refused_everywhere, "logits_to_keep must be how many.*got -1", replace(logits_to_keep=-1)
    ),
    "routing": partial(
        refused_everywhere,
        "loss over the routing",
        replace(output_router_logits=True),
        "gpt_oss",
        UnsupportedModelError,
    ),
    "a loss that can't be told": partial(
        refused_everywhere, "must take shift_labels", lambda b: b, with_a_loss_of_its_own, UnsupportedModelError
    ),
    "rotary embeddings that grow": rotary_embeddings_that_grow,
    "too few heads": few_heads,
    "unknown exchange": partial(
        refused_on_entry,
        "exchange must be one of 'all_gather', 'ring', 'ulysses', 'varlen_llama3'.*got 'p2p'",
        make_model,
        exchange="p2p",
    ),
    "unknown layout": partial(
        refused_on_entry, "layout must be one of 'contiguous'.*got 'greedy'", make_model, layout="greedy"
    ),
    "a scheme of two minds": partial(
        refused_on_entry,
        "'batch_zigzag' has the layout 'zigzag'; got layout='stripe'",
        make_model,
        exchange="batch_zigzag",
        layout="stripe",
    ),
    "unknown reduction": partial(
        refused_on_entry, "grad_reduce must be 'mean' or 'sum'; got 'avg'", make_model, grad_reduce="avg"
    ),
    "no model": partial(
        refused_on_entry, "expected a transformers model; got Linear", lambda: nn.Linear(2, 2), UnsupportedModelError
    ),
    "recurrences": partial(
        refused_on_entry, "MambaMixer.*recurrence or convolution", lambda: from_config("mamba"), UnsupportedModelError
    ),
    "dense attention": partial(
        refused_on_entry,
        "'gpt_neo' attends by 'dense'",
        lambda: from_config("gpt_neo", num_layers=2, num_heads=2, attention_types=[[["global"], 2]]),
        UnsupportedModelError,
    ),
    "transformers' attention": partial(refused_on_entry, "attends by 'sdpa'", patched_for_sdpa, UnsupportedModelError),
    "classifiers": partial(
        refused_on_entry, "LlamaForSequenceClassification reads one token", sequence_classifier, UnsupportedModelError
    ),
    "the second of two models": partial(
        refused_on_entry, "MambaMixer", lambda: [make_model(), from_config("mamba")], UnsupportedModelError
    ),
    "settings differ": settings_differ,
    "not in the group": not_in_the_group,
    "apart": apart,
    "entered twice": entered_twice,
    "unpatched inside": unpatched_inside,
    "without comparing": without_comparing,
}

# What differs with the number of ranks: who is at fault, and who is told.
ALSO_ON_FOUR = [
    *("restores", "nests", "two models", "rotary embeddings that grow", "too few heads", "other tokens"),
    *("other lengths", "no tokens on one rank", "settings differ", "not in the group", "apart"),
]
