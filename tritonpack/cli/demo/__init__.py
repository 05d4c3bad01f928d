"""`tritonpack demo`: one small Llama trained on the same documents padded, naively concatenated, and packed."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from tritonpack.cli.demo.checks import check_ways
from tritonpack.cli.demo.corpus import Corpus, Document, read_corpus
from tritonpack.cli.demo.model import Settings, shape_of
from tritonpack.cli.demo.report import count, table, verdict
from tritonpack.cli.demo.training import WARMUP_STEPS, train_in_turns
from tritonpack.cli.machine import resolve_device

NUM_VALIDATION = 64


@dataclass(frozen=True)
class Defaults:
    """What a device makes sensible."""

    dtype: str
    size: str
    max_length: int
    documents: int


_DEFAULTS = {
    "cpu": Defaults(dtype="float32", size="tiny", max_length=2048, documents=8),  # done within minutes
    "cuda": Defaults(dtype="bfloat16", size="small", max_length=4096, documents=64),  # enough for a GPU to do
}


@dataclass(frozen=True)
class Options:
    """How much to train, and the folder, which exists, that the picture goes to."""

    steps: int
    documents: int | None
    out: Path


def settings_for(device: str, dtype: str, size: str, max_length: int | None, threads: int, seed: int) -> Settings:
    """The settings that options stand for, "auto" and None being whatever suits the device.

    Raises:
        ValueError: the device isn't there.
    """
    device = resolve_device(device).type
    defaults = _DEFAULTS[device]
    return Settings(
        seed=seed,
        device=device,
        dtype=getattr(torch, defaults.dtype if dtype == "auto" else dtype),
        shape=shape_of(defaults.size if size == "auto" else size),
        max_length=max_length or defaults.max_length,
        threads=threads,
    )


def run_demo(settings: Settings, options: Options) -> bool:
    """Train the three ways, print what was measured, draw the picture.

    Returns:
        Whether packed training turned out exact and isolated.
    """
    from tritonpack.cli.demo.figure import draw

    console = Console()
    documents = options.documents or _DEFAULTS[settings.device].documents
    corpus = read_corpus(settings.max_length, NUM_VALIDATION, settings.seed)
    steps = corpus.steps(options.steps, documents, settings.seed)
    for line in _preface(corpus, settings, options.steps, documents):
        console.print(line, highlight=False)
    runs = train_in_turns(steps, corpus.validation, settings)
    checks = check_ways(steps[0], settings)
    findings = verdict(runs, checks)
    console.print(table(runs))
    for sentence in findings.sentences:
        console.print(sentence, highlight=False)
    picture = options.out / "demo.png"
    draw(picture, runs, _typical_step(steps))
    console.print(f"Picture: {picture}", highlight=False)
    return findings.holds


def _preface(corpus: Corpus, settings: Settings, steps: int, documents: int) -> Iterator[str]:
    yield (
        f"{corpus.functions:,} documented functions of Python {platform.python_version()}'s standard library, as bytes."
        f" {corpus.split:,} of them are longer than {settings.max_length:,} tokens and were split, which makes "
        f"{len(corpus.training):,} documents to train on and {len(corpus.validation):,} held out."
    )
    if corpus.unreadable:
        yield f"Left out, because this Python can't parse them: {count(corpus.unreadable, 'file')}."
    dtype = str(settings.dtype).removeprefix("torch.")
    threads = count(settings.threads, "CPU thread")
    yield (
        f"{steps} steps of {count(documents, 'document')} each way: the {settings.shape.name} model on "
        f"{settings.device}, {dtype}, {threads}. Each way has a fresh process, and they take turns, step by step; the "
        f"first {WARMUP_STEPS} steps aren't timed."
    )


def _typical_step(steps: Sequence[Sequence[Document]]) -> list[int]:
    """The lengths of the step whose share of padding is closest to the mean over all steps."""
    lengths = [[len(document) for document in documents] for documents in steps]
    shares = [1 - sum(step) / (len(step) * max(step)) for step in lengths]
    mean = sum(shares) / len(shares)
    return min(zip(shares, lengths, strict=True), key=lambda pair: abs(pair[0] - mean))[1]
