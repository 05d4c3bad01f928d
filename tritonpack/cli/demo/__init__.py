"""`tritonpack demo`: one small Llama trained on the same documents padded, naively concatenated, and packed."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from tritonpack.cli.demo.corpus import read_corpus
from tritonpack.cli.demo.model import SIZES, Settings, Way, attention_of, build_model
from tritonpack.cli.demo.report import compare_losses, table
from tritonpack.cli.demo.training import WARMUP_STEPS, train_in_turns
from tritonpack.cli.machine import resolve_device
from tritonpack.cli.words import count
from tritonpack.errors import IsolationError
from tritonpack.testing import check_isolation

NUM_VALIDATION = 64


class Defaults(NamedTuple):
    """The options that suit a device."""

    dtype: str
    size: str
    max_length: int
    documents: int


_DEFAULTS = {
    "cpu": Defaults("float32", "tiny", max_length=2048, documents=8),  # takes minutes
    "cuda": Defaults("bfloat16", "small", max_length=4096, documents=64),  # keeps a GPU busy
}


def settings_for(device: str, dtype: str, size: str, max_length: int | None, threads: int, seed: int) -> Settings:
    """The settings for the options; "auto" and None mean the default of the device.

    Raises:
        ValueError: there is no such device.
    """
    device = resolve_device(device).type
    defaults = _DEFAULTS[device]
    return Settings(
        seed=seed,
        device=device,
        dtype=getattr(torch, defaults.dtype if dtype == "auto" else dtype),
        shape=SIZES[defaults.size if size == "auto" else size],
        max_length=max_length or defaults.max_length,
        threads=threads,
    )


def run_demo(settings: Settings, num_steps: int, documents: int | None, out: Path) -> bool:
    """Train the three ways, print the measurements, draw the picture.

    Args:
        num_steps: optimizer steps of each way.
        documents: documents per step; None means the default of the device.
        out: the folder for the picture, which exists.

    Returns:
        Whether packed documents are isolated and packed training stayed closer to padded training than naive did.
    """
    from tritonpack.cli.demo.figure import draw

    console = Console()
    documents = documents or _DEFAULTS[settings.device].documents
    corpus = read_corpus(settings.max_length, NUM_VALIDATION, settings.seed)
    steps = corpus.steps(num_steps, documents, settings.seed)
    console.print(
        f"{corpus.functions:,} documented functions of Python {platform.python_version()}'s standard library, as bytes."
        f" {corpus.split:,} of them are longer than {settings.max_length:,} tokens and were split, which makes "
        f"{len(corpus.training):,} documents to train on and {len(corpus.validation):,} held out.\n"
        f"{count(num_steps, 'step')} of {count(documents, 'document')} each way: the {settings.shape.name} model on "
        f"{settings.device}, {str(settings.dtype).removeprefix('torch.')}, {count(settings.threads, 'CPU thread')}. "
        "Each way has a fresh process, and they take turns, step by step; the first "
        f"{WARMUP_STEPS} steps aren't timed.",
        highlight=False,
    )
    runs = train_in_turns(steps, corpus.validation, settings)
    console.print(table(runs))
    closer, sentence = compare_losses(runs, nothing_leaks=documents == 1)
    console.print(sentence, highlight=False)
    _, leak = isolation("naive", settings)
    isolated, proof = isolation("packed", settings)
    console.print(leak, proof, sep="\n", markup=False, highlight=False)
    picture = out / "demo.png"
    # The step whose share of padding is the median.
    lengths = sorted(([len(document) for document in step] for step in steps), key=lambda n: sum(n) / max(n))
    draw(picture, runs, lengths[len(lengths) // 2])
    console.print(f"Picture: {picture}", highlight=False, soft_wrap=True)
    return closer and isolated


def isolation(way: Way, settings: Settings) -> tuple[bool, str]:
    """Whether documents of one row don't see each other, and the result of `check_isolation` in words."""
    model = build_model(settings)
    with attention_of(way, model):
        try:
            return True, f"{way}: {check_isolation(model, seed=settings.seed)}"
        except IsolationError as error:
            return False, f"{way}: {error}"
