"""Train a small Llama on groups of GRPO: padded, packed, and in two ways that compute each prompt once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples.demo.corpus import END_OF_DOCUMENT
from examples.demo.grpo.rollouts import Group
from examples.demo.measuring import Measurements, Step, in_turns, measure
from examples.demo.training import Settings, build_model
from tritonpack import pack_tree, patch
from tritonpack.packing import PackingCollator
from tritonpack.packing.collator import IGNORED_LABEL
from tritonpack.patches.patching import Patch

Way = Literal["padded", "packed", "shared", "tree"]
WAYS: tuple[Way, ...] = get_args(Way)


class Targets(NamedTuple):
    """The tokens of completions, each predicted by the logits of its place.

    Attributes:
        tokens: (rows, targets) int64; 0 for padding.
        weights: (rows, targets) float32, the advantage of the completion, divided by the number of all tokens of
            completions in the step; 0 for padding.
    """

    tokens: Tensor
    weights: Tensor


def attention_of(way: Way, model: torch.nn.Module) -> AbstractContextManager[Patch | None]:
    """A context in which the model has the attention of a way: stock for `padded`, else tritonpack's."""
    return nullcontext() if way == "padded" else patch(model, share_prefixes=way == "shared")


def collate(way: Way, groups: Sequence[Group], device: str) -> Step:
    """The batch of one step. Every way asks for the logits of the completions' tokens alone.

    `padded` and `shared` have a row for each completion, with the prompt padded on the left and the completion on the
    right, as GRPOTrainer of TRL makes them. `packed` is one row with all sequences, and `tree` one row with each prompt
    once.
    """
    completions = [torch.as_tensor(completion, device="cpu") for group in groups for completion in group.completions]
    counts = torch.tensor([len(completion) for completion in completions], device="cpu")
    advantages = torch.as_tensor(np.concatenate([group.advantages for group in groups]), device="cpu").float()
    weights = advantages / counts.sum()
    sequences = [torch.as_tensor(tokens, device="cpu") for group in groups for tokens in group.sequences()]
    prompts = [len(tokens) - len(completion) for tokens, completion in zip(sequences, completions, strict=True)]
    if way in ("padded", "shared"):
        inputs, targets = _padded(sequences, prompts, completions, weights)
    else:
        labels = [
            torch.cat([torch.full((length,), IGNORED_LABEL, device="cpu"), completion])
            for length, completion in zip(prompts, completions, strict=True)
        ]
        inputs = _packed(sequences, labels) if way == "packed" else pack_tree(sequences, labels=labels).inputs()
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
        targets = Targets(torch.cat(completions)[None], weights.repeat_interleave(counts)[None])
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return Step(inputs, sum(map(len, sequences)), Targets(*(value.to(device) for value in targets)))


def loss_of(model: torch.nn.Module, step: Step) -> Tensor:
    """Minus the mean of advantage times log-probability over all tokens of completions, in float32.

    Its gradient equals GRPO's in the first update on a batch, where the ratio of the policies is 1.
    """
    targets: Targets = step.extra
    logits = model(**step.inputs, use_cache=False).logits[:, : targets.tokens.shape[1]].float()
    scores = logits.gather(-1, targets.tokens[..., None])[..., 0] - logits.logsumexp(-1)
    return -(targets.weights * scores).sum()


def train(way: Way, steps: Sequence[Sequence[Group]], settings: Settings) -> Iterator[Measurements | None]:
    """Train from scratch in one way.

    Yields:
        None when the model is built and after each optimizer step, then the measurements.
    """
    model = build_model(settings).train()
    batches = (collate(way, groups, settings.device) for groups in steps)
    with attention_of(way, model) as handle:
        yield (yield from measure(model, handle, settings.learning_rate, batches, loss_of, settings.device))


def train_in_turns(steps: Sequence[Sequence[Group]], settings: Settings) -> dict[Way, Measurements]:
    """Train every way on the same groups, one optimizer step per entry of `steps`.

    Raises:
        BrokenProcessPool: a process ended early, for example for lack of memory.
    """
    return in_turns({way: partial(train, way, steps, settings) for way in WAYS}, len(steps), settings.threads)


def _padded(
    sequences: Sequence[Tensor], prompts: Sequence[int], completions: Sequence[Tensor], weights: Tensor
) -> tuple[dict[str, Any], Targets]:
    longest = max(prompts)
    left = [longest - length for length in prompts]
    rows = [
        torch.cat([torch.full((padding,), END_OF_DOCUMENT, device="cpu"), tokens])
        for padding, tokens in zip(left, sequences, strict=True)
    ]
    real = [
        torch.cat([torch.zeros(padding, dtype=torch.int64, device="cpu"), torch.ones_like(tokens)])
        for padding, tokens in zip(left, sequences, strict=True)
    ]
    tokens = pad_sequence(list(completions), batch_first=True)
    own = [weight.expand(len(completion)) for weight, completion in zip(weights, completions, strict=True)]
    inputs = {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=END_OF_DOCUMENT),
        "attention_mask": pad_sequence(real, batch_first=True),
        "logits_to_keep": tokens.shape[1] + 1,  # the last token of the prompt predicts the first of the completion
    }
    return inputs, Targets(tokens, pad_sequence(own, batch_first=True))


def _packed(sequences: Sequence[Tensor], labels: list[Tensor]) -> dict[str, Any]:
    features = [{"input_ids": ids, "labels": own} for ids, own in zip(sequences, labels, strict=True)]
    return {**PackingCollator()(features), "logits_to_keep": (torch.cat(labels) != IGNORED_LABEL).nonzero()[:, 0] - 1}
