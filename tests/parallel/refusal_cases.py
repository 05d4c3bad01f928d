"""Arguments, models, calls and differing batches that SequenceParallel refuses, on every rank and without a hang."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from tests.parallel import models
from tests.parallel.models import close, is_last, logits_of, make_model, mesh_of, numbers, on_ranks, packed, state_of
from tests.patches.models import COMMON
from tritonpack import SequenceParallel, UnsupportedModelError, patch, unpatch
from tritonpack.parallel import consistency

BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64,
    "decoder_attention_heads": 2, "is_encoder_decoder": True,
}  # fmt: skip
TOKENS = 51  # of `packed()`
TORN = torch.ones(1, TOKENS, dtype=torch.long)  # padding inside a document
TORN[0, 20] = 0


def of(family, kind=AutoModelForCausalLM, **sizes):
    return kind.from_config(AutoConfig.for_model(family, **sizes or COMMON))


def patched(**options):
    model = make_model()
    patch(model, **options)
    return model


def replaced(**changes):
    return lambda batch: batch | changes


# On entry: words of the message, what makes the models, options.
ENTRIES = {
    "a trainer": ("got a SimpleNamespace, which holds a model; pass", lambda: SimpleNamespace(model=make_model())),
    "no models": (r"expected a model, or several; got \[\]", list),
    "dense attention": ("'gpt_neo' attends by 'dense'",
                        lambda: of("gpt_neo", num_layers=2, num_heads=2, attention_types=[[["global"], 2]], **COMMON)),
    "attention of transformers": ("attends by 'sdpa'", partial(patched, attention="sdpa")),
    "sequence classifier": ("LlamaForSequenceClassification gives one result for each row",
                            lambda: of("llama", AutoModelForSequenceClassification)),
    "encoder-decoder": ("BartForConditionalGeneration holds an encoder and a decoder",
                        lambda: of("bart", AutoModelForSeq2SeqLM, **BART)),
    "second of two models": ("MultiHeadAttention", lambda: [make_model(), of("xlm")]),
    "check_batches": ("check_batches must be True or False; got str 'x'", make_model, {"check_batches": "x"}),
    "gather_outputs": ("gather_outputs must be True or False; got str 'no'", make_model, {"gather_outputs": "no"}),
    "layout": ("layout must be one of 'contiguous'.*got 'spiral'", make_model, {"layout": "spiral"}),
    "exchange": ("exchange must be one of 'auto', 'all_gather', .*'p2p'", make_model, {"exchange": "p2p"}),
    "group": (r"share a batch in a process group.* got str 'sp'.*mesh\['sp'\]", make_model, {"group_or_mesh": "sp"}),
    "a pair without a mesh": ("needs one exchange; got .* for one dim", make_model, {"exchange": ("ring", "ulysses")}),
}  # fmt: skip
# A mesh that doesn't fit its exchanges: words of the message, what makes the mesh, the exchanges.
PAIR = ("ring", "ulysses")
MESHES = {
    "one name": ("needs a pair of exchanges.*'all_gather' for two dimensions", lambda: mesh_of(2, 2), "all_gather"),
    "two pairs": (
        "a pair: 'ulysses' for the dimension along which.*got",
        lambda: mesh_of(2, 2),
        ("ulysses", "ulysses"),
    ),
    "no pair": ("a pair: 'ulysses' for the dimension along which.*got", lambda: mesh_of(2, 2), (*PAIR, "ring")),
    "three": ("DeviceMesh of 3 dimensions.*pass one or two", lambda: mesh_of(1, 2, 2), PAIR),
    "order of ranks": (r"ascend row by row; got \[\[0, 2\]", lambda: DeviceMesh("cpu", [[0, 2], [1, 3]]), PAIR),
    "without names": ("needs names, such as|isn't in the group", lambda: DeviceMesh("cpu", [[0], [1]]), PAIR),
}
# In a call: words of the message, a change of the batch.
CALLS = {
    "no tokens": (r"at least one token; got tokens of shape \(1, 0\)", lambda _: {"input_ids": numbers(1, 0)}),
    "neither ids nor embeddings": ("either input_ids or inputs_embeds", replaced(input_ids=None)),
    "use_cache": ("without a cache", replaced(use_cache=True)),
    "4-D mask": ("attention_mask must be two-dim", replaced(attention_mask=torch.zeros(1, 1, TOKENS, TOKENS))),
    "mask that counts from 0": (
        r"marks as padding by 0\..*pass attention_mask \+ 1",
        lambda batch: {**batch, "attention_mask": (batch["position_ids"] == 0).cumsum(1) - 1},
    ),
    "labels of another shape": (r"labels must have.*\(1, 51\); got \(1, 50\)", replaced(labels=numbers(1, 50))),
    "kept logits": ("logits_to_keep names tokens of whole rows.*Leave it out", replaced(logits_to_keep=3)),
    "images": (r"pixel_values has shape \(1, 3, 8, 8\)", replaced(pixel_values=torch.zeros(1, 3, 8, 8))),
    "rows in a tuple": (r"noise has shape \(1, 51\) in a tuple", replaced(noise=(torch.zeros(1, TOKENS),))),
    "trees": ("tree_ends says that sequences share tokens", replaced(tree_ends=torch.arange(TOKENS)[None] + 1)),
}
# The last rank passes another batch: words of the message on every rank, a change of the batch.
DIFFERENCES = {
    "other tokens": ("different batches or .*: input_ids differs", replaced(input_ids=numbers(1, TOKENS, seed=9))),
    "other order": ("input_ids differs", lambda batch: batch | {"input_ids": batch["input_ids"].flip(1)}),
    "other documents": ("position_ids differs", replaced(position_ids=torch.arange(TOKENS)[None])),
    "other lengths": ("input_ids, position_ids, labels differ", lambda batch: {n: x[:, :40] for n, x in batch.items()}),
    "other arguments": ("output_hidden_states, return_dict differ", replaced(output_hidden_states=1, return_dict=True)),
    "other numbers": ("num_items_in_batch differs", replaced(num_items_in_batch=torch.tensor(40))),
}
# The last rank alone refuses its batch, and the others name its error.
ERRORS = {
    "torn document on one rank": ("has padding inside a document", replaced(attention_mask=TORN, position_ids=None)),
}


def refused_on_entry(message, make, options=None):
    """The context raises on entry, and the models stay unchanged."""
    given = make()
    inside = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, nn.Module)]
    before = list(map(state_of, inside))
    with pytest.raises(ValueError, match=message), SequenceParallel(given, **options or {}):
        raise AssertionError("entered")
    assert before == list(map(state_of, inside))


def refused_call(message, change):
    model = make_model()
    with SequenceParallel(model), pytest.raises(ValueError, match=message):
        model(**change(packed()))


def differs(message, change=lambda batch: batch, training=True):
    model, batch = make_model(), packed()
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=message), torch.set_grad_enabled(training or not is_last()):
            model(**(change(batch) if is_last() else batch))
        assert model(**batch).loss.isfinite()  # the group still works


def error_on_the_last_rank(message, change):
    differs(message if is_last() else rf"(?s)other ranks .* rank {dist.get_world_size() - 1}: .*{message}", change)


def the_model_and_autocast():
    model, other = make_model(), make_model()
    with SequenceParallel([model, other]):
        with pytest.raises(ValueError, match="batches or settings: the model that is called differs"):
            (other if is_last() else model)(**packed())
        with torch.autocast("cpu", enabled=is_last()), pytest.raises(ValueError, match="settings: autocast differs"):
            model(**packed())
        if is_last():
            model.gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="settings: gradient checkpointing differs"):
            model(**packed())


def settings_differ():
    model = make_model()
    with pytest.raises(ValueError, match="batches or settings: layout differs"):
        SequenceParallel(model, layout="zigzag" if dist.get_rank() == 0 else "stripe").__enter__()
    others = f"other ranks.*rank {dist.get_world_size() - 1}: ValueError: exchange must"
    with pytest.raises(ValueError, match="exchange must be one of" if is_last() else others):
        SequenceParallel(model, exchange="p2p" if is_last() else "ring").__enter__()
    assert "forward" not in model.__dict__


def one_bit_differs():
    """Of one number of a tensor that is hashed in several parts."""
    model, batch = make_model(), models.embeddings()
    with mock.patch.object(consistency, "CHUNK", 64), SequenceParallel(model):
        for place in (0, 17, batch["inputs_embeds"].numel() - 1):
            other = batch["inputs_embeds"].clone()
            other.view(-1).view(torch.int64)[place] ^= is_last()
            with pytest.raises(ValueError, match="different batches or settings: inputs_embeds differs"):
                model(**batch | {"inputs_embeds": other})
        other = batch["inputs_embeds"].repeat(1, 1, 2)[..., 1:33]  # not contiguous
        assert model(**batch | {"inputs_embeds": other}).loss.isfinite()


def parameters_began_differently():
    """One matrix differs: before the first forward all are compared, later ones in turn."""
    model = make_model()
    weight = max(model.parameters(), key=torch.Tensor.numel)
    before = weight.detach().clone()
    with SequenceParallel(model):
        weight.data.mul_(1.5 if is_last() else 1.0)
        with pytest.raises(ValueError, match=r"parameters differ between the ranks.*began with different values"):
            model(**packed())
        weight.data.copy_(before)
        model(**packed())
        weight.data.mul_(1.5 if is_last() else 1.0)
        calls = (model(**packed()) for _ in model.parameters())
        with pytest.raises(ValueError, match="parameters differ between the ranks"):
            list(calls)


def changed_inside():
    """A model can be neither unpatched nor patched again inside, and goes on."""
    model = make_model()
    with SequenceParallel(model):
        wanted, before = logits_of(model), state_of(model)
        for call in (partial(patch, unpad=True), unpatch):
            with pytest.raises(ValueError, match=r"inside of SequenceParallel.* Leave the context"):
                call(model)
            assert state_of(model) == before
            close(logits_of(model), wanted, "afterwards")


def misused_context():
    context = SequenceParallel(make_model())
    for call in (context.shard, context.gather, context.total):
        with pytest.raises(ValueError, match="no batch has been shared yet"):
            call(torch.zeros(1, 1))
    with context, pytest.raises(ValueError, match="entered already"):
        context.__enter__()
    with context:  # once more after leaving
        logits_of(context.models[0])
        with pytest.raises(ValueError, match=r"tokens of shape \(1, 51\).*got shape \(1, 50\)"):
            context.shard(torch.zeros(1, 50))
        with pytest.raises(ValueError, match=r"its shard must be \(1, \d+, ...\); got shape \(1, 51\)"):
            context.gather(torch.zeros(1, TOKENS))


def losses_that_ranks_cannot_share():
    """A masked model computes its loss itself, and another one by an unknown function."""
    model = of("roberta", AutoModelForMaskedLM).double().eval()
    with SequenceParallel(model):
        model(**{name: x for name, x in models.padded().items() if name != "labels"})
        with pytest.raises(UnsupportedModelError, match=r"computes its loss without its loss .*gather_outputs=True"):
            model(**models.padded())
    model = make_model()
    model.loss_function = lambda logits, labels, vocab_size, **_: models.exact_loss(logits, labels, vocab_size)
    with SequenceParallel(model), pytest.raises(UnsupportedModelError, match=r"must take shift_labels.*Pass no labels"):
        model(**packed())


class OwnHead(nn.Module):
    """A head around a base model, with a loss of its own."""

    def __init__(self, model):
        super().__init__()
        self.base, self.project = model.model, model.lm_head

    def forward(self, *, labels, **batch):
        return models.exact_loss(self.project(self.base(**batch).last_hidden_state), labels, None)


def own_head():
    """It gets this rank's rows, and torch refuses them; with gather_outputs it is exact."""
    for batch in (packed(), models.two_rows()):
        with pytest.raises(ValueError, match=r"(?s)to match.* this rank's rows, .*gather_outputs=True.*context.shard"):
            on_ranks(OwnHead(make_model()), OwnHead.__call__, batch)
        model = make_model()
        got = on_ranks(OwnHead(model), OwnHead.__call__, batch, gather_outputs=True)
        got = got._replace(gradients=models.mean_over(None, models.gradients_of(model)))
        models.same(got, models.alone(make_model(), models.loss_of, batch))


CASES = {
    **{name: partial(refused_on_entry, *given) for name, given in ENTRIES.items()},
    **{
        f"mesh, {name}": lambda message=message, mesh=mesh, pair=pair: refused_on_entry(
            message, make_model, {"group_or_mesh": mesh(), "exchange": pair}
        )
        for name, (message, mesh, pair) in MESHES.items()
    },
    **{name: partial(refused_call, *given) for name, given in CALLS.items()},
    **{name: partial(differs, *given) for name, given in DIFFERENCES.items()},
    **{name: partial(error_on_the_last_rank, *given) for name, given in ERRORS.items()},
    "no gradients on one rank": partial(differs, "whether gradients are computed differs", training=False),
    "the model and autocast": the_model_and_autocast,
    "settings differ": settings_differ,
    "one bit differs": one_bit_differs,
    "parameters began differently": parameters_began_differently,
    "changed inside": changed_inside,
    "misused context": misused_context,
    "losses that ranks cannot share": losses_that_ranks_cannot_share,
    "own head": own_head,
}
# The rank at fault and the ranks that name it differ with the number of ranks.
ALSO_ON_FOUR = ["other tokens", "other lengths", "torn document on one rank", "settings differ"]
