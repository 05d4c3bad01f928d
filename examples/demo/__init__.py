"""`make demo`: one small Llama trained on the same documents in four ways."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from examples.demo.corpus import Corpus
from examples.demo.measuring import WARMUP_STEPS
from examples.demo.training import (
    WAYS,
    Run,
    Settings,
    Way,
    attention_of,
    build_model,
    train_in_turns,
)
from tritonpack.cli.machine import resolve_device
from tritonpack.errors import IsolationError
from tritonpack.packing.lengths import count
from tritonpack.testing import check_isolation

if TYPE_CHECKING:  # so that benchmarks/training.py runs where rich is absent
    from rich.table import Table

NUM_VALIDATION = 64

# Arguments of `LlamaConfig`, and the learning rate.
SIZES = {
    "tiny": (
        {
            "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        3e-3,
    ),
    "small": (
        {
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
            "num_key_value_heads": 4,
        },
        6e-4,
    ),
}  # fmt: skip


def settings_for(device: str, dtype: str, size: str, max_length: int | None, threads: int, seed: int) -> Settings:
    """The settings for the options; "auto" and None mean what keeps a GPU busy, or a CPU for minutes.

    Raises:
        ValueError: there is no such device.
    """
    device = resolve_device(device).type
    on_gpu = device == "cuda"
    size = ("small" if on_gpu else "tiny") if size == "auto" else size
    dtype = ("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype
    max_length = max_length or (4096 if on_gpu else 2048)
    return Settings(size, *SIZES[size], max_length, device, getattr(torch, dtype), threads, seed)


def run_demo(settings: Settings, corpus: Corpus, num_steps: int, documents: int | None, out: Path) -> bool:
    """Train all ways, print the measurements, draw the picture.

    Args:
        corpus: the documents to train on, and those held out.
        num_steps: optimizer steps of each way.
        documents: documents per step; None means 64 on a GPU and 8 on a CPU.
        out: the folder for the picture, which exists.

    Returns:
        Whether packed documents are isolated, and unpadded and packed training stayed closer to padded training than
        naive did.
    """
    from rich.console import Console

    from examples.demo.figure import draw

    console = Console(highlight=False)
    documents = documents or (64 if settings.device == "cuda" else 8)
    steps = corpus.steps(num_steps, documents, settings.seed)
    console.print(
        f"{corpus.functions:,} documented functions of Python {platform.python_version()}'s standard library, as bytes,"
        f" split at {settings.max_length:,} tokens: {len(corpus.training):,} documents to train on, "
        f"{len(corpus.validation):,} held out.\n"
        f"{count(num_steps, 'step')} of {count(documents, 'document')} each way: the {settings.model} model on "
        f"{settings.device}, {str(settings.dtype).removeprefix('torch.')}, {count(settings.threads, 'CPU thread')}. "
        "Each way has a fresh process, and they take turns of ten steps; the first "
        f"{WARMUP_STEPS} steps aren't timed."
    )
    try:
        runs = train_in_turns(steps, corpus.validation, settings)
    except BrokenProcessPool as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    console.print(table(runs))
    closer, sentence = compare_losses(runs, nothing_leaks=documents == 1)
    _, leak = isolation("naive", settings)
    isolated, proof = isolation("packed", settings)
    console.print(sentence, leak, proof, sep="\n", markup=False)
    picture = out / "demo.png"
    # The step whose share of padding is the median.
    lengths = sorted(([len(document) for document in step] for step in steps), key=lambda n: sum(n) / max(n))
    draw(picture, runs, lengths[len(lengths) // 2])
    console.print(f"Picture: {picture}", markup=False, soft_wrap=True)
    return closer and isolated


def table(runs: Mapping[Way, Run]) -> Table:
    """One row per way."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    padded = runs["padded"]
    result = Table(
        title="The same documents in the same order, four ways",
        caption="unpadded: the padded batches, with tritonpack.patch(model, unpad=True). "
        "Tokens per second don't count padding. Losses are in nats per token: held-out is computed alike for "
        "all, each document alone, with stock attention; the gap is the largest distance of a step's training loss "
        "from padded's.",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    result.add_column("way", no_wrap=True)
    for header in ("tokens/s", "speed", "peak\nmemory", "padding", "held-out\nloss", "gap to\npadded"):
        result.add_column(header, justify="right", no_wrap=True)
    for way in WAYS:
        run = runs[way]
        result.add_row(
            way,
            f"{run.tokens_per_second:,.0f}",
            f"{run.tokens_per_second / padded.tokens_per_second:.2f}x",
            run.memory(),
            f"{run.padding_share:.1%}",
            f"{run.validation_loss:.4f}",
            "" if way == "padded" else f"{run.gap(padded):.1e}",
        )
    return result


def compare_losses(runs: Mapping[Way, Run], nothing_leaks: bool) -> tuple[bool, str]:
    """Compare the gaps of all ways to padded training.

    Args:
        nothing_leaks: whether every step has one document, so that naive training is exact too.

    Returns:
        Whether the gaps of unpadded and packed are smaller than naive's (or nothing leaks), and a sentence with all.
    """
    unpadded, packed, naive = (runs[way].gap(runs["padded"]) for way in ("unpadded", "packed", "naive"))
    sentence = (
        f"Over the run, unpadded's training loss stays within {unpadded:.1e} of padded's, packed's within "
        f"{packed:.1e}, and naive's within {naive:.1e}."
    )
    wrong = [way for way, gap in (("unpadded", unpadded), ("packed", packed)) if not (nothing_leaks or gap < naive)]
    for way in wrong:  # also if a loss is NaN
        sentence += f" {way.upper()} IS NO CLOSER THAN NAIVE: {way} training went wrong."
    return not wrong, sentence


def isolation(way: Way, settings: Settings) -> tuple[bool, str]:
    """Return whether documents of one row don't see each other, and the result of `check_isolation` in words."""
    model = build_model(settings)
    with attention_of(way, model):
        try:
            return True, f"{way}: {check_isolation(model, seed=settings.seed)}"
        except IsolationError as error:
            return False, f"{way}: {error}"
