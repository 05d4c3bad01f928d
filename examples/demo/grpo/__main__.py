"""Train a small Llama on groups of GRPO, with each prompt computed for every completion and once; draw a picture.

Exit code: 1 if a training process failed or the losses don't agree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib  # noqa: F401 - the picture needs it, after minutes of training

from examples.demo import settings_for
from examples.demo.corpus import read_corpus
from examples.demo.grpo import run_demo
from examples.demo.grpo.rollouts import Shape
from examples.demo.options import at_least, make_parser
from tritonpack.cli.machine import require_writable


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("examples.demo.grpo", __doc__, 6)
    parser.add_argument("--prompts", type=at_least(1), help="prompts per step (default: 2, 4 on a GPU)")
    parser.add_argument("--completions", type=at_least(2), default=8, help="completions of each prompt (default: 8)")
    parser.add_argument("--prompt-length", type=at_least(16), default=2048, help="most tokens of a prompt")
    parser.add_argument("--completion-length", type=at_least(16), default=256, help="most tokens of a completion")
    options = parser.parse_args(arguments)
    longest = options.prompt_length + options.completion_length
    try:
        settings = settings_for(options.device, options.dtype, options.size, longest, options.threads, options.seed)
        require_writable(options.out / "demo-grpo.png", "--out")
        corpus = read_corpus(settings.max_length, 0, options.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    prompts = options.prompts or (4 if settings.device == "cuda" else 2)
    shape = Shape(prompts, options.completions, options.prompt_length, options.completion_length)
    return int(not run_demo(settings, corpus, shape, options.steps, options.out))


if __name__ == "__main__":
    sys.exit(main())
