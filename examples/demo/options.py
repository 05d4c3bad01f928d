"""The options that both demos have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def make_parser(program: str, about: str | None, steps: int) -> argparse.ArgumentParser:
    """A parser with the common options. `steps` is the default of --steps."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=at_least(3), default=steps, help=f"optimizer steps of each way (default: {steps})"
    )
    parser.add_argument("--size", choices=("auto", "tiny", "small"), default="auto", help="auto: tiny, small on a GPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: float32, bfloat16 on a GPU"
    )
    parser.add_argument("--threads", type=at_least(1), default=1, help="CPU threads (default: 1)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="decides weights, documents and their order")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for the picture (default: demo-out)")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """A parser for integers from `least` on."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}; got {text}")
        return value

    return integer
