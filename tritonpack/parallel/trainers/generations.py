"""TRL's trainers that generate (GRPO, RLOO) inside of SequenceParallel: ranks of a group get the same completions.

Generation needs a cache, so it runs on whole sequences on every rank. Ranks draw different random numbers, so all ranks
of a group take the completions of their first one.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from tritonpack.parallel.comm import first_object
from tritonpack.parallel.replaced import replaced
from tritonpack.parallel.trainers.accelerators import Replica, counted_as_one

_GENERATES, _SCORES, _REWARDS = "_generate_single_turn", "_generate_and_score_completions", "_calculate_rewards"


def share_generations(trainer: Any, replica: Replica, context: Any, stack: ExitStack) -> None:
    """Give the ranks of a group the same completions and rewards, until the stack ends. For other trainers: nothing.

    Raises:
        ValueError: settings with which it can't be done.
    """
    if not all(hasattr(trainer, name) for name in (_GENERATES, _SCORES, _REWARDS)):
        return
    _check(trainer, replica)
    args, ranks = trainer.args, replica.ranks
    generates, scores, rewards = (getattr(trainer, name) for name in (_GENERATES, _SCORES, _REWARDS))

    @wraps(generates)
    def generate(*some: Any, **others: Any) -> Any:
        with context.paused():
            result = generates(*some, **others)
        return first_object(result, ranks)

    @wraps(scores)
    def score(*some: Any, **others: Any) -> Any:
        with counted_as_one(trainer.accelerator, replica):
            result = scores(*some, **others)
        torch.set_rng_state(first_object(torch.get_rng_state(), ranks))  # samples are shuffled next
        return result

    replaced(stack, trainer, _GENERATES, generate)
    replaced(stack, trainer, _SCORES, score)
    replaced(stack, trainer, _REWARDS, wraps(rewards)(lambda *some, **others: replica.pick(rewards(*some, **others))))
    replaced(stack, args, "generation_batch_size", args.generation_batch_size // ranks.size)


def _check(trainer: Any, replica: Replica) -> None:
    args, size = trainer.args, replica.ranks.size
    for name, remedy in (
        ("use_vllm", "vLLM divides prompts among all processes. Pass use_vllm=False."),
        ("log_completions", "TRL gathers completions of all processes, and ranks of a group have the same ones. Pass "
                            "log_completions=False."),
    ):  # fmt: skip
        if getattr(trainer, name, False):
            raise ValueError(f"with SequenceParallel a trainer can't have {name}=True: {remedy}")
    generations = trainer.num_generations
    if args.generation_batch_size % (size * generations):
        raise ValueError(
            f"the {size} ranks of a group generate together, so a generation batch of {args.generation_batch_size} "
            f"completions is one of {args.generation_batch_size / size:g} for them, which must be a multiple of "
            f"num_generations={generations}. Raise per_device_train_batch_size or steps_per_generation, or lower "
            "num_generations."
        )
