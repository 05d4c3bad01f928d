"""`make demo-grpo`: one small Llama trained on the same groups of GRPO in four ways."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from examples.demo.corpus import Corpus
from examples.demo.grpo.rollouts import Shape, make_groups
from examples.demo.grpo.training import WAYS, Way, train_in_turns
from examples.demo.measuring import WARMUP_STEPS, Measurements
from examples.demo.training import Settings
from tritonpack.packing.lengths import count

# Gaps between losses that may be rounding. The largest seen were 1.2e-07 and 5.5e-04. Where the sequences of a row saw
# each other, losses in float32 moved by 5e-04.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def run_demo(settings: Settings, corpus: Corpus, shape: Shape, num_steps: int, out: Path) -> bool:
    """Train all ways, print the measurements, draw the picture.

    Args:
        corpus: the documents that prompts and completions are made from.
        num_steps: optimizer steps of each way.
        out: the folder for the picture, which exists.

    Returns:
        Whether the losses of all ways agree.
    """
    from examples.demo.grpo.figure import draw

    console = Console(highlight=False)
    steps = make_groups(corpus.training, shape, num_steps, settings.seed)
    console.print(
        f"{count(num_steps, 'step')} of {count(shape.prompts, 'prompt')} with {count(shape.completions, 'completion')} "
        f"each, made from Python's standard library. Prompts have up to {shape.prompt_length:,} tokens, completions up "
        f"to {shape.completion_length:,}. The {settings.model} model on {settings.device}, "
        f"{str(settings.dtype).removeprefix('torch.')}, {count(settings.threads, 'CPU thread')}. The loss has the "
        "gradient of GRPO's first update on a batch. Each way has a fresh process, and they take turns of ten steps; "
        f"the first {WARMUP_STEPS} steps aren't timed."
    )
    try:
        runs = train_in_turns(steps, settings)
    except BrokenProcessPool as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    agree, sentence = compare_losses(runs, settings.dtype)
    console.print(table(runs))
    over_padded, over_packed = (runs[way].seconds_per_step / runs["shared"].seconds_per_step for way in WAYS[:2])
    console.print(
        f"shared takes {over_padded:.2f} steps in the time of one of padded, and {over_packed:.2f} in the time of one "
        "of packed."
    )
    console.print(sentence, markup=False)
    picture = out / "demo-grpo.png"
    draw(picture, runs, steps[len(steps) // 2])
    console.print(f"Picture: {picture}", markup=False, soft_wrap=True)
    return agree


def table(runs: Mapping[Way, Measurements]) -> Table:
    """One row per way."""
    padded = runs["padded"]
    result = Table(
        title="The same prompts and completions, four ways",
        caption="padded: stock sdpa. packed: one row with all sequences, tritonpack.patch(model). shared: the padded "
        "batch, tritonpack.patch(model, share_prefixes=True). tree: one row from tritonpack.pack_tree. All ways "
        f"compute logits for completions alone. A step has {sum(padded.tokens) / len(padded.tokens):,.0f} tokens on "
        "average, padding not counted; tokens per second count these. The gap is the largest distance of a step's loss "
        "from padded's.",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    result.add_column("way", no_wrap=True)
    for header in (
        "tokens\ncomputed", "s per\nstep", "tokens/s", "speed", "peak\nmemory", "of\npadded", "gap to\npadded",
    ):  # fmt: skip
        result.add_column(header, justify="right", no_wrap=True)
    for way in WAYS:
        run = runs[way]
        known = run.peak_bytes is not None and padded.peak_bytes is not None
        result.add_row(
            way,
            f"{sum(run.computed) / len(run.computed):,.0f}",
            f"{run.seconds_per_step:.2f}",
            f"{run.tokens_per_second:,.0f}",
            f"{padded.seconds_per_step / run.seconds_per_step:.2f}x",
            run.memory(),
            f"{run.peak_bytes / padded.peak_bytes:.2f}" if known else "",  # type: ignore[operator]
            "" if way == "padded" else f"{run.gap(padded):.1e}",
        )
    return result


def compare_losses(runs: Mapping[Way, Measurements], dtype: torch.dtype) -> tuple[bool, str]:
    """Compare the losses of all ways with padded's.

    Returns:
        Whether the losses of every step agree, and sentences with them.
    """
    allowed = ALLOWED[dtype]
    gaps = {way: runs[way].gap(runs["padded"]) for way in WAYS[1:]}
    wrong = [way for way in WAYS[1:] if not gaps[way] <= allowed]  # also NaN
    losses = ", ".join(f"{loss:.4f}" for loss in runs["padded"].losses)
    verdict = f"THE LOSSES OF {', '.join(wrong)} ARE WRONG" if wrong else "The losses of all ways agree"
    largest = max(gaps.values(), key=lambda gap: (gap != gap, gap))
    gap = f"the largest gap is {largest:.1e}, and {allowed:.0e} is allowed"
    return not wrong, f"Loss of each step: {losses}. {verdict}: {gap}."
