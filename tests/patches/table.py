"""docs/models.md: what becomes of every model type, with tritonpack and without.

python -m tests.patches.table [--out docs/models.md]
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
import transformers
from rich.progress import track

import tritonpack
from tests.patches import sweep, zoo
from tritonpack.patches import Report

INTRODUCTION = """\
# Every model type

Written by `python -m tests.patches.table`: a tiny random model of each of transformers {version}'s causal types, with
windows, chunks and selections shorter than its documents, in float64. Documents are packed and padded in {forms} ways
({names})
and held against each document alone, logits and gradients; and another document's tokens must move nothing. The same
runs in `tests/patches/test_every_model.py`, where gradients are compared for one of the forms that say the same of a
row in other words.

- **tritonpack**: {packed}.
- **Stock, position ids alone** (and the default cache): {positions}.
- **Stock, position ids and an all-ones mask**: {ones}.

*How*: kernels, unless said otherwise. *Dense*: the family's attention lies outside of transformers' interface and gets
the documents' mask as a tensor, O(T^2) memory. *By document*: layers that mix along the row run on each document by
itself, unless their kernels can be told where documents begin. *Positions*: a table of absolute positions is looked up
by the place in the document. Numbers are differences relative to the largest logit or gradient.

| type | packed | worst | how | stock, position ids | stock, all-ones mask |
|---|---|---|---|---|---|
"""


def how(name: str) -> str:
    """What a patch does for a type, in a few words."""
    report: Report = tritonpack.patch(zoo.tiny_model(name)).report
    words = ["dense"] if report.attention == "dense" else []
    if windows := {window for window in report.windows if window}:
        words.append(f"window{'s' if len(windows) > 1 else ''}")
    words += [feature.rstrip("0123456789.").removesuffix(" of").strip() for feature in report.features]
    if report.by_document:
        words.append("by document")
    if report.positions:
        words.append("positions")
    return ", ".join(words)


def counted(verdicts: list[str]) -> str:
    found = Counter(verdicts)
    words = {
        "exact": "exact",
        "refused": "refused",
        "leak": "leak",
        "inexact": "inexact",
        "error": "fail",
        "unbuilt": "",
    }
    parts = [f"{found[key]} {word}" for key, word in words.items() if found[key] and word]
    return ", ".join(parts) + (f" ({found['unbuilt']} can't be built)" if found["unbuilt"] else "")


def page() -> str:
    rows, packed, stock = [], [], {form: [] for form in ("position_ids", "all_ones_mask")}
    for name in track(zoo.MODEL_TYPES, description="model types"):
        ours = sweep.run(name)
        theirs = sweep.run(name, patch=None, forms=list(stock), gradients=False)
        packed.append(ours.verdict)
        for form, verdicts in stock.items():
            verdicts.append(theirs.by_form.get(form, theirs.verdict))
        before = [theirs.by_form.get(form, "") for form in stock]
        if ours.verdict == "exact":
            rows.append([name, "exact", f"{ours.worst:.0e}", how(name), *before])
        else:
            reason = ours.reason.partition("can't be packed exactly: ")[2] or ours.reason
            rows.append([name, ours.verdict, "", reason.rstrip("."), *before])
    head = INTRODUCTION.format(
        version=transformers.__version__, forms=len(sweep.FORMS), names=", ".join(sweep.FORMS).replace("_", " "),
        packed=counted(packed), positions=counted(stock["position_ids"]), ones=counted(stock["all_ones_mask"]),
    )  # fmt: skip
    return head + "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.table", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/models.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    options.out.write_text(page())
    print(f"{options.out} written")


if __name__ == "__main__":
    main()
