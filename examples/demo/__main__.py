"""Train a small Llama padded, with unpad=True, naively concatenated and packed; compare, and draw a picture.

Exit code: 1 if a training process failed, or if unpadded or packed training wasn't exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib  # noqa: F401 - the picture needs it, after minutes of training

from examples.demo import NUM_VALIDATION, run_demo, settings_for
from examples.demo.corpus import read_corpus
from examples.demo.options import at_least, make_parser
from tritonpack.cli.machine import require_writable


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("examples.demo", __doc__, 24)
    parser.add_argument("--documents", type=at_least(1), help="documents per step (default: 8, 64 on a GPU)")
    parser.add_argument("--max-length", type=at_least(16), help="split longer documents (default: 2048, 4096 on a GPU)")
    options = parser.parse_args(arguments)
    try:
        settings = settings_for(
            options.device, options.dtype, options.size, options.max_length, options.threads, options.seed
        )
        require_writable(options.out / "demo.png", "--out")
        corpus = read_corpus(settings.max_length, NUM_VALIDATION, options.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return int(not run_demo(settings, corpus, options.steps, options.documents, options.out))


if __name__ == "__main__":
    sys.exit(main())
