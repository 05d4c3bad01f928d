"""docs/models.md and tritonpack/patches/exact_classes.csv: what the sweep found of every class.

python -m tests.patches.table [--out docs/models.md] [--shown tritonpack/patches/exact_classes.csv]
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import transformers

from tests.patches.sweep import forms, results
from tests.patches.sweep.classes import Case, cases, mappings
from tests.patches.sweep.padded import takes_options
from tests.patches.sweep.results import ANY, OPTIONS, RESULTS, SHOWN, Row

INTRODUCTION = """\
# Every model class

Here is what becomes of each class of transformers {version} that takes text and that an auto class leads to, when
documents are packed: a tiny random model of the very class, with windows, chunks and selections shorter than its
documents. `python -m tests.patches.sweep` finds it out, `python -m tests.patches.table` writes this page.

A class is tried in {count} ways of a call: {names}. Documents packed, or padded, are held against each
document alone in a call of its own: every output, in float64, gradients in two of the ways; in float32 and bfloat16 the
error may be twice what the model alone makes. Heads with one score for a sequence refuse packed rows. Losses, those of
routers among them, must be what the same documents give without packing, and their gradients too.

- **exact**: in every way that the class can be called.
- **partly**: exact in some, refused in others by an error that says why.
- **refused**: when it is patched, or in every call.
- **wrong**: packed documents differ from those alone, and nobody says so.
- **error**: an error that isn't ours.
- **not built**: there is no tiny model of it; the reason is in its row.

{verdicts}

## By auto class

*Patched* is `tritonpack.patch(model)`, *named* is `attn_implementation="tritonpack"`. A class that several auto classes
lead to counts in each. *Stock leaks* counts the classes whose documents see each other without tritonpack, told by
position ids alone.

{counts}

## Padded batches as one row

Each class of *Causal lm* is also tried on padded batches with `patch(model, unpad=True)`, and with
`patch(model, share_prefixes=True)` on groups of documents that begin alike, in no order
([padded-batches.md](padded-batches.md)). Batches have one document a row with padding on the right or on the left, or
several documents a row with padding between them. They come with position ids and a mask, and rows of one document also
with a mask alone. Outputs, hidden states, losses with labels, and the gradients of outputs and losses must equal those
of each document alone.

- **exact**: in every way, and `handle.saved` shows that no padding was computed, and no shared token twice. The one
  token of padding right before a document stays, because a causal head predicts the document's first token from it.
- **as it is**: results are exact, but in some way the model ran on the padded batch; the reason is in its row.
- **refused**, **wrong**, **not built**: as above.

{options}

{padded}

## By class

*How*: kernels, unless said otherwise. *Dense*: attention outside of transformers' interface gets the documents' mask as
a tensor, O(T^2) memory. *By document*: layers that mix along the row run on each document by itself, unless their
kernels can be told where documents begin. *Positions*: a table of absolute positions is looked up by the place in the
document. *Worst* bounds the differences in exact ways, relative to the largest value, by a power of ten.

{rows}

## Classes that take no text

They are left out: {rule}.

{left_out}
"""

RULE = "a class takes text if its `forward` has `input_ids` or `decoder_input_ids`"
COLUMNS = ("exact", "partly", "refused", "wrong", "error", "not built")
OF_OPTIONS = ("exact", "as it is", "partly", "refused", "wrong", "error", "stock", "not built")


def simple(verdict: str) -> str:
    return "wrong" if verdict in results.WRONG else verdict


def table(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    rows = [list(head), ["---"] * len(list(head)), *lines]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)


class Found:
    """Rows of one version, by case and way."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row.key, row.how): row for row in rows}

    def of(self, case: Case, how: str) -> Row:
        row = self.rows.get((case.key, how)) or self.rows.get((case.key, ANY))
        if row is None:
            raise SystemExit(f"{case.key} has no row for {how!r}; run python -m tests.patches.sweep first.")
        return row


def counts(found: Found, listed: list[Case]) -> str:
    lines = []
    for mapping in mappings():
        there = [case for case in listed if mapping in case.mappings]
        if not there:
            continue
        cells: list[object] = [mapping.replace("_", " ").capitalize(), len(there)]
        for how in ("patch", "name"):
            seen = Counter(simple(found.of(case, how).verdict) for case in there)
            cells += [seen[verdict] or "" for verdict in COLUMNS[: -1 if how == "name" else None]]
        cells.append(sum(found.of(case, "stock").forms.get("position_ids", "") in results.WRONG for case in there))
        lines.append(cells)
    patched = [f"patched: {verdict}" if i == 0 else verdict for i, verdict in enumerate(COLUMNS)]
    named = [f"named: {verdict}" if i == 0 else verdict for i, verdict in enumerate(COLUMNS[:-1])]
    return table(["auto class", "classes", *patched, *named, "stock leaks"], lines)


def class_rows(found: Found, listed: list[Case]) -> str:
    lines = []
    for case in listed:
        patch, name = found.of(case, "patch"), found.of(case, "name")
        worst = _bound(patch.worst) if "exact" in patch.forms.values() else ""
        verdict = simple(name.verdict) if name.how != ANY else ""
        lines.append([case.name, case.model_type, simple(patch.verdict), worst, patch.means, verdict, why(patch)])
    return table(["class", "type", "patched", "worst", "how", "named", "why"], lines)


def _bound(worst: float) -> str:
    """The power of ten that a difference is below: its digits change from run to run."""
    return f"{10.0 ** math.ceil(math.log10(worst)):.0e}" if worst else "0"


def reason_of(row: Row) -> str:
    """The reason in a row, without what all reasons begin with."""
    reason = row.reason.partition("can't be packed exactly: ")[2] or row.reason
    for word in ("when patched: ", "UnsupportedModelError: ", "ValueError: "):
        reason = reason.replace(word, "")
    return reason


def why(row: Row) -> str:
    short = shortened(reason_of(row))
    return ("" if row.verdict == "exact" else short.rstrip(".")) + (f" ({row.note[:120]})" if row.note else "")


def options_counts(found: Found, listed: list[Case]) -> str:
    """What becomes of the classes that are exact when patched, with each option."""
    exact = [case for case in listed if found.of(case, "patch").verdict == "exact"]
    lines = []
    for option in OPTIONS:
        seen = Counter(simple(found.of(case, option).verdict) for case in exact)
        said = ", ".join(f"{seen[verdict]} {verdict}" for verdict in OF_OPTIONS if seen[verdict] or verdict == "wrong")
        lines.append(f"**{option}**, of the {len(exact)} classes that are exact when patched: {said}.")
    return "\n".join(lines)


def options_rows(found: Found, listed: list[Case]) -> str:
    lines = []
    for case in listed:
        rows = [found.of(case, option) for option in OPTIONS]
        reasons = dict.fromkeys(filter(None, map(why_not_compacted, rows)))
        worst = max(row.worst for row in rows)
        lines.append([case.name, case.model_type, *(simple(row.verdict) for row in rows),
                      _bound(worst) if worst else "", "; ".join(reasons)])  # fmt: skip
    return table(["class", "type", *OPTIONS, "worst", "why"], lines)


def why_not_compacted(row: Row) -> str:
    """The reason in a row with an option: what a trial found, or the first sentence, up to what is to be done."""
    said = reason_of(row)
    found = said.partition("A trial on a few tokens found: ")[2].removeprefix("position_ids: ")  # in older rows
    found = found or said.partition("don't stay apart: ")[2]
    said = re.sub(r"^(\w+): (?=\d)", r"in a trial \1 differ: ", found) or said
    return shortened(said.partition(". ")[0].partition(", so ")[0])


def shortened(text: str, longest: int = 160) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def left_out(found: Found) -> str:
    reasons: dict[str, list[str]] = {}
    for case in cases():
        row = found.of(case, "patch")
        if row.verdict == "no text":
            reasons.setdefault(row.reason, []).append(case.name)
    return "\n".join(f"- {reason}: {', '.join(sorted(set(names)))}." for reason, names in sorted(reasons.items()))


def sentence(found: Found, version: str) -> str:
    """What the README says of all classes."""
    rows = [found.of(case, "patch") for case in cases()]
    seen = Counter(simple(row.verdict) for row in rows)
    built = sum(seen[verdict] for verdict in COLUMNS[:-1])
    wrong = seen["wrong"] + seen["error"]
    return (
        f"Of the {built:,} pairs of a class and a model type for text in transformers' auto classes ({version}) "
        f"tritonpack packs {seen['exact']:,} exactly, {seen['partly']:,} exactly or not at all (classifiers of "
        f"sequences), refuses {seen['refused']:,}, and gets {wrong or 'none'} wrong."
    )


def of_version(rows: Iterable[Row]) -> str:
    """What became of all patched classes with one version of transformers."""
    patched = [row for row in rows if row.how in ("patch", ANY)]
    seen = Counter(simple(row.verdict) for row in patched)
    return ", ".join(f"{seen[verdict]} {verdict}" for verdict in COLUMNS)


def page(found: Found, version: str) -> str:
    listed = [case for case in cases() if found.of(case, "patch").verdict != "no text"]
    listed.sort(key=lambda case: (case.model_type, case.name))
    causal = [case for case in listed if takes_options(case)]
    lines = []
    for how, words in (("patch", "Patched"), ("name", "Named")):
        seen = Counter(simple(found.of(case, how).verdict) for case in listed)
        said = ", ".join(f"{seen[verdict]} {verdict}" for verdict in COLUMNS if seen[verdict])
        lines.append(f"**{words}**, of {len(listed)} pairs of class and model type: {said}.")
    print(sentence(found, version))
    return INTRODUCTION.format(
        version=version, count=len(forms.ALL), names=", ".join(forms.ALL).replace("_", " "), rule=RULE,
        verdicts="\n".join(lines), counts=counts(found, listed), rows=class_rows(found, listed),
        left_out=left_out(found), options=options_counts(found, causal), padded=options_rows(found, causal),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.table", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--shown", type=Path, default=SHOWN)
    options = parser.parse_args()
    version = transformers.__version__
    options.out.write_text(page(Found(results.load(options.results, version)), version))
    rows = results.load(options.results)
    results.save_shown(rows, options.shown)
    for version in sorted({row.version for row in rows}, key=lambda version: [*map(int, version.split("."))]):
        print(f"transformers {version}: {of_version([row for row in rows if row.version == version])}")
    print(f"{options.out} and {options.shown} written")


if __name__ == "__main__":
    main()
