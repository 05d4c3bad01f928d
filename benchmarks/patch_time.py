"""How long patch() and unpatch() take on models as deep as real ones (narrow, so that they fit anywhere).

python -m benchmarks.patch_time
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack


def main() -> None:
    print(f"{'layers':>6} {'patch':>10} {'unpatch':>10}")
    for layers in (16, 32, 80):
        config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=2)
        config.num_hidden_layers = layers
        model, times = LlamaForCausalLM(config), []
        for _ in range(21):
            begin = perf_counter()
            handle = tritonpack.patch(model)
            middle = perf_counter()
            handle.unpatch()
            times.append((middle - begin, perf_counter() - middle))
        on, off = (1e3 * median(column) for column in zip(*times, strict=True))
        print(f"{layers:6} {on:7.2f} ms {off:7.2f} ms")


if __name__ == "__main__":
    main()
