"""Ranks that fail, leave or end while others wait. All ranks raise soon, and say which rank it was and why.

Each case has a group of its own, because failures abort groups. Watches look often, so that cases are short.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parallel.models import (
    BATCHES,
    alone_on,
    loss_of,
    make_batch,
    make_model,
    on_ranks,
    packed,
    same,
)
from tritonpack import RankFailedError, SequenceParallel
from tritonpack.parallel import consistency, watch

OTHER = r"Rank \d of the sequence-parallel group"
SECONDS = 15  # the pool's collectives give up after 20


class UserError(Exception):
    pass


def is_last():
    return dist.get_rank() == dist.get_world_size() - 1


def last():
    return dist.get_world_size() - 1


def culprit():
    """How messages name the last rank."""
    return "This rank" if is_last() else f"Rank {last()} of the sequence-parallel group"


def make_group():
    return dist.new_group(list(range(dist.get_world_size())))


@contextmanager
def quick() -> Iterator[None]:
    """Watches that look often; the context must not take long."""
    start = time.monotonic()
    with mock.patch.object(watch, "PERIOD", 0.05):
        yield
    assert time.monotonic() - start < SECONDS


def train(model, on_error=(UserError, IndexError), before=lambda number: None, after=lambda loss, number: None):
    """Three steps of a user's loop, which catches errors in the second one and goes on."""
    for number in (1, 2, 3):
        before(number)
        try:
            loss = model(**bad_label(make_batch(number), number == 2 and before is label)).loss
            if after(loss, number) != "skip":
                loss.backward()
        except on_error:
            assert number == 2


def label(number):
    """Marks the training whose second batch has a label outside of the vocabulary, in the rows of the last rank."""


def bad_label(batch, bad):
    labels = batch["labels"].clone()
    labels[0, -1] = 10**6 if bad else labels[0, -1]
    return batch | {"labels": labels}


def in_loss(model):
    train(model, before=label)


def raise_here(error, *_):
    raise error


def in_forward(model, error=None):
    def hook(*_):
        if is_last() and hook.number == 2:
            raise error or UserError("my hook")

    model.model.layers[1].register_forward_hook(hook)
    train(model, before=lambda number: setattr(hook, "number", number))


def in_backward(model):
    def after(loss, number):
        if is_last() and number == 2:
            loss.register_hook(partial(raise_here, UserError("my hook")))

    train(model, after=after)


def backward_is_skipped(model):
    train(model, after=lambda loss, number: "skip" if is_last() and number == 2 else None)


def interrupted(model):
    in_forward(model, KeyboardInterrupt("Ctrl-C"))


def left_between_forward_and_backward(model):
    def after(loss, number):
        if is_last() and number == 2:
            raise UserError("as after a break")

    train(model, (), after=after)


def raises(fault, message, error_on_the_last_rank=RankFailedError, **options):
    """The last rank has a fault in the second of three batches, and every rank raises; then ranks take a new group.

    Errors, also of the last rank, if it goes on, and of a rank that learns it from a third one, say what the fault was.
    """
    group, model = make_group(), make_model()
    with quick():
        error = error_on_the_last_rank if is_last() else RankFailedError
        with pytest.raises(error) as caught, SequenceParallel(model, group, **options):
            fault(model)
        said = [str(caught.value)] if error is RankFailedError else []
        with pytest.raises(RankFailedError, match="The group was aborted") as caught, SequenceParallel(model, group):
            raise AssertionError("entered")
    same(on_ranks(make_model(), loss_of, packed(), group=make_group()), alone_on("llama", "packed"))
    for text in [*said, str(caught.value)]:
        assert re.match(f"{culprit()} {message}", text), text
        assert len(re.findall(OTHER, text)) == 1, text  # and no message within the message
        assert "make a new group" in text


def error_on_every_rank(where):
    """Ranks that fail at the same place are in step: they go on, and the group stays usable."""
    group, model = make_group(), make_model()
    with quick(), SequenceParallel(model, group):
        for options in ({}, {"attention_mask": torch.zeros(1, 3, dtype=torch.long)}):
            handle = where(model).register_forward_hook(partial(raise_here, UserError("my hook")))
            with pytest.raises((UserError, ValueError), match=r"my hook|attention_mask"):
                model(**packed() | options)
            handle.remove()
        model(**packed()).loss.backward()
    model.zero_grad()
    same(on_ranks(model, loss_of, packed(), group=group), alone_on("llama", "packed"))


def errors_at_different_places():
    """All ranks fail in a batch, but one of them an exchange earlier: no rank waits, and the next batch raises."""
    group, model = make_group(), make_model()
    layer = model.model.layers[0 if is_last() else 1]
    handle = layer.register_forward_hook(partial(raise_here, UserError("my hook")))
    with quick(), SequenceParallel(model, group, layout="contiguous", exchange="group_cast"):
        with pytest.raises((UserError, RankFailedError)):
            model(**packed())
        handle.remove()
        with pytest.raises(RankFailedError, match=rf"({OTHER}|This rank) .*in batch 1, .*UserError"):
            model(**packed())


def numbers_of_exchanges_differ():
    """Ranks that come to one batch with different numbers of exchanges would mix up the next ones."""
    group, model = make_group(), make_model()
    with quick(), SequenceParallel(model, group):
        model(**packed()).loss.backward()
        watch.known_watch(group).exchanges += is_last()
        with pytest.raises(RankFailedError, match=r"Rank \d .* went on to batch 2"):
            model(**packed())


def one_rank_has_fewer_batches():
    """The others raise at their next batch. No exchange is left unfinished, so all go on with the same group."""
    group, model = make_group(), make_model()
    with quick():
        batches = [make_batch(number) for number in range(2 if is_last() else 3)]
        message = rf"Rank {last()} .* left the context at batch 2.* went on to batch 3.*group still works"
        raised = nullcontext() if is_last() else pytest.raises(RankFailedError, match=message)
        with raised, SequenceParallel(model, group):
            for batch in batches:
                model(**batch).loss.backward()
    model.zero_grad()
    same(on_ranks(model, loss_of, packed(), group=group), alone_on("llama", "packed"))


def one_rank_is_late():
    """Ranks wait at a batch for a slow rank, for longer than watches wait for a look; nothing raises."""
    model = make_model()
    with mock.patch.object(watch, "PERIOD", 0.02), SequenceParallel(model, make_group()):
        for number in range(3):
            if is_last():
                time.sleep(0.2)
            loss = model(**make_batch(number)).loss
            if not is_last():
                time.sleep(0.2)
            loss.backward()


def contexts_in_each_other():
    """An error in the inner context's forward ends the outer one, too."""
    group, model, other = make_group(), make_model(), make_model()
    with quick(), SequenceParallel(model, group):
        model(**packed()).loss.backward()
        with SequenceParallel(other, group), torch.no_grad():
            other(**packed())
        model(**packed()).loss.backward()
        if is_last():
            other.model.layers[0].register_forward_hook(partial(raise_here, UserError("my hook")))
        raised = pytest.raises(UserError if is_last() else RankFailedError, match="my hook")
        with raised, SequenceParallel(other, group), torch.no_grad():
            other(**packed())
        with pytest.raises(RankFailedError, match="my hook"):
            model(**packed())


def nothing_is_left_behind():
    """Neither a thread nor, in the store, more than the records of the last batches."""
    store, model = dist.distributed_c10d._get_default_store(), make_model()

    def threads():
        return [one for one in threading.enumerate() if one.name == "tritonpack watch"]

    assert not threads()
    group = make_group()
    keys = []
    with quick():
        for _ in range(2):
            with SequenceParallel(model, group), torch.no_grad():
                for _ in range(4):
                    model(**packed())
                assert len(threads()) == 1
                dist.barrier()
                keys.append(store.num_keys())
                dist.barrier()
            time.sleep(0.2)
            assert not threads()
    assert keys[1] - keys[0] <= 2 * dist.get_world_size()


def floating_point_arguments_are_compared():
    """One bit of one number differs, in a place that depends on the dtype's size and the tensor's length."""
    model, batch = make_model(), BATCHES["embeddings"]()
    with quick(), mock.patch.object(consistency, "CHUNK", 64), SequenceParallel(model, make_group()):
        for place in (0, 17, batch["inputs_embeds"].numel() - 1):
            other = batch["inputs_embeds"].clone()
            other.view(-1).view(torch.int64)[place] ^= is_last()
            with pytest.raises(ValueError, match="different batches: inputs_embeds differs"):
                model(**batch | {"inputs_embeds": other})
        other = batch["inputs_embeds"].repeat(1, 1, 2)[..., 1:33]  # not contiguous, and shifted
        assert model(**batch | {"inputs_embeds": other}).loss.isfinite()


CASES = {
    "error in forward": partial(raises, in_forward, "failed in batch 2, .*UserError: my hook"),
    "label outside of the vocabulary": partial(
        raises,
        in_loss,
        "failed in batch 2, .*IndexError: Target 1000000 is out of bounds",
        layout="contiguous",
    ),
    "error in backward": partial(raises, in_backward, "went on to batch 3 before the end of the batch before"),
    "backward is skipped": partial(raises, backward_is_skipped, "went on to batch 3"),
    "interrupt": partial(raises, interrupted, "failed in batch 2, .*KeyboardInterrupt: Ctrl-C", KeyboardInterrupt),
    "left in a batch": partial(
        raises, left_between_forward_and_backward, "left the context at batch 2, .*after a break", UserError
    ),
    "error in forward, batches unchecked": partial(
        raises, in_forward, "failed in batch 2, .*UserError: my hook", check_batches=False
    ),
    "error in backward, batches unchecked": partial(raises, in_backward, "went on to batch 3", check_batches=False),
    "error on every rank in a layer": partial(error_on_every_rank, lambda model: model.model.layers[1]),
    "error on every rank after all exchanges": partial(error_on_every_rank, lambda model: model),
}
CASES |= {
    f"error in backward, {exchange}": partial(raises, in_backward, "went on to batch 3", exchange=exchange)
    for exchange in ("group_cast", "ring", "ulysses")
}
CASES |= {
    case.__name__.replace("_", " "): case
    for case in (
        errors_at_different_places,
        numbers_of_exchanges_differ,
        one_rank_has_fewer_batches,
        one_rank_is_late,
        contexts_in_each_other,
        nothing_is_left_behind,
        floating_point_arguments_are_compared,
    )
}
ALSO_ON_FOUR = ["error in forward", "backward is skipped", "one rank has fewer batches", "errors at different places"]
