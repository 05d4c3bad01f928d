"""Measure training steps with the logits of a whole batch and with a tiled loss: peak memory and time.

    python -m benchmarks.tiled_loss [--tokens 4096] [--vocabulary 32768] [--rows 256 1024]

Each way has a process of its own. The memory is the most that a step takes beyond the model and its gradients; the time
is the median of the steps after the first. The losses must be equal.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack


class Result(NamedTuple):
    """The result of one way: the peak memory in bytes, the median time of a step in seconds, and the loss."""

    peak: int
    seconds: float
    loss: float


def measure(tiled_loss: int, tokens: int, vocabulary: int, steps: int) -> Result:
    """Train a small Llama on one row of random tokens in documents of 512.

    Args:
        tiled_loss: the rows of a tile, 0 for all logits.
        tokens: of the row.
        vocabulary: words.
        steps: of which the first isn't timed.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(1, vocabulary, (1, tokens))
    places = (torch.arange(tokens) % 512)[None]
    batch = {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill(places == 0, -100)}
    tritonpack.patch(model, tiled_loss=tiled_loss or False)
    before, times = _resident(), []
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Result(peak - before, statistics.median(times[1:]), loss.item())


def _resident() -> int:
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(argv)
    size = options.tokens * options.vocabulary * 4 / 2**20
    print(f"{options.tokens:,} tokens, {options.vocabulary:,} words: all logits in float32 are {size:,.0f} MiB")
    print(f"{'rows of a tile':16}{'peak MiB':>10}{'seconds':>9}{'loss':>10}")
    for rows in (0, *options.rows):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            result = pool.submit(measure, rows, options.tokens, options.vocabulary, options.steps).result()
        name = f"{rows:,}" if rows else "all logits"
        print(f"{name:16}{result.peak / 2**20:10,.0f}{result.seconds:9.2f}{result.loss:10.5f}", flush=True)


if __name__ == "__main__":
    main()
