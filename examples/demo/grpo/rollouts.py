"""The groups of GRPO: prompts with completions and their advantages, made from the demo's documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from examples.demo.corpus import Document

_SHORTEST = 7 / 8  # of the longest prompt


@dataclass(frozen=True)
class Shape:
    """The number and the lengths of a step's prompts and completions.

    Attributes:
        prompts: prompts of a step.
        completions: completions of each prompt.
        prompt_length: the most tokens of a prompt; the shortest has seven eighths of them.
        completion_length: the most tokens of a completion.
    """

    prompts: int
    completions: int
    prompt_length: int
    completion_length: int


class Group(NamedTuple):
    """A prompt with its completions.

    Attributes:
        advantages: one number for each completion, of mean 0 and standard deviation 1.
    """

    prompt: Document
    completions: list[Document]
    advantages: NDArray[np.float64]

    def sequences(self) -> list[Document]:
        """The prompt with each of its completions."""
        return [np.concatenate([self.prompt, completion]) for completion in self.completions]


def make_groups(documents: Sequence[Document], shape: Shape, num_steps: int, seed: int) -> list[list[Group]]:
    """The groups of each step.

    A prompt is documents end to end, cut at a length drawn from the seed. A completion is the beginning of one
    document. The documents are taken in turn, and again from the first when they are used up. Advantages are drawn, as
    rewards would be, and normalized in each group.
    """
    rng = np.random.default_rng([seed, 2])
    taken = cycle(documents)
    steps: list[list[Group]] = []
    for _ in range(num_steps):
        groups = []
        for _ in range(shape.prompts):
            length = int(rng.integers(int(_SHORTEST * shape.prompt_length), shape.prompt_length, endpoint=True))
            parts, room = [], length
            while room:
                parts.append(next(taken)[:room])
                room -= len(parts[-1])
            completions = [next(taken)[: shape.completion_length] for _ in range(shape.completions)]
            rewards = rng.normal(size=shape.completions)
            groups.append(Group(np.concatenate(parts), completions, (rewards - rewards.mean()) / rewards.std()))
        steps.append(groups)
    return steps
