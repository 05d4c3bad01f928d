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

PAGE = Path(__file__).parent / "sweep" / "models.md.in"  # docs/models.md, with fields in braces

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
    return PAGE.read_text().format(
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
