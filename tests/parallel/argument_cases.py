"""What SequenceParallel refuses of its own arguments, with what is allowed: on every rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parallel.models import make_model, packed
from tritonpack import SequenceParallel


def refused(message, model=None, group=None, **options):
    given = make_model() if model is None else model()
    with pytest.raises(ValueError, match=message), SequenceParallel(given, group, **options):
        raise AssertionError("entered")


def takes_the_layout_of_a_scheme():
    model = make_model()
    for options, layout in (({}, "balanced"), ({"exchange": "batch_zigzag"}, "zigzag")):
        with SequenceParallel(model, **options) as context:
            assert context.layout == layout
    with SequenceParallel(model, exchange="varlen_llama3", layout="contiguous") as context:
        assert (context.exchange, context.layout) == ("all_gather", "contiguous")


def names_what_differs():
    """Arguments that one rank passes and another doesn't, or with another value, are named."""
    model, last = make_model(), dist.get_rank() == dist.get_world_size() - 1
    items = torch.tensor(40 + last)
    with SequenceParallel(model):
        with pytest.raises(ValueError, match=r"different batches: num_items_in_batch differs from rank to rank"):
            model(**packed(), num_items_in_batch=items)
        more = {"output_hidden_states": True} if last else {}
        with pytest.raises(ValueError, match=r"num_items_in_batch, output_hidden_states differ from rank to rank"):
            model(**packed(), num_items_in_batch=items, **more)
        assert model(**packed(), num_items_in_batch=40).loss.isfinite()  # and the group still works


CASES = {
    "no model": partial(refused, r"expected a model, an instance of torch.nn.Module; got None of type", lambda: None),
    "a name": partial(refused, r"got the name 'gpt2'; load it first", lambda: "gpt2"),
    "a class": partial(refused, r"got the class LlamaForCausalLM; make a model of it first", lambda: LlamaForCausalLM),
    "a configuration": partial(refused, r"got a LlamaConfig; make a model of it first", LlamaConfig),
    "a number": partial(refused, r"got 3 of type int", lambda: 3),
    "no models": partial(refused, r"expected a model, or several; got \[\]", list),
    "a name among models": partial(refused, r"got the name 'gpt2'", lambda: [make_model(), "gpt2"]),
    "the name of a group": partial(refused, r"group must be a process group.* got str 'sp'.*mesh\['sp'\]", group="sp"),
    "a rank": partial(refused, r"group must be .* got int 3", group=3),
    "ranks": partial(refused, r"group must be .* got list \[0\].*new_group\(ranks\)", group=[0]),
    "check_batches": partial(refused, "check_batches must be True or False; got str 'x'", check_batches="x"),
    "gather_outputs": partial(refused, "gather_outputs must be True or False; got str 'no'", gather_outputs="no"),
    "a scheme and the default's name": partial(
        refused, "'varlen_llama3' has the layout 'contiguous'; got layout='balanced'", exchange="varlen_llama3",
        layout="balanced",
    ),
    "a list of exchanges": partial(refused, r"exchange must be one of .* got \['ring'\]", exchange=["ring"]),
    "takes the layout of a scheme": takes_the_layout_of_a_scheme,
    "names what differs": names_what_differs,
}  # fmt: skip
ALSO_ON_FOUR = ["names what differs"]
