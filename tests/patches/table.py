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
from tests.patches.sweep.classes import Case, cases
from tests.patches.sweep.results import HOWS, NEVER, OPTIONS, RESULTS, SHOWN, Row

PAGE = Path(__file__).parent / "sweep" / "models.md.in"  # docs/models.md, with fields in braces
COLUMNS = ("exact", "partly", "refused", "wrong", "error", "not built")
OF_OPTIONS = ("exact", "as it is", "partly", "refused", "wrong", "error", "stock", "not built")


class Found:
    """Rows of one version, by case and way."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row.key, row.how): row for row in rows}
        self.listed = [case for case in cases() if self.of(case, "patch").verdict != "no text"]
        self.listed.sort(key=lambda case: (case.model_type, case.name))

    def of(self, case: Case, how: str) -> Row:
        row = self.rows.get((case.key, HOWS[0]))
        row = row if row and row.verdict in NEVER else self.rows.get((case.key, how))
        if row is None:
            raise SystemExit(f"{case.key} has no row for {how!r}; run python -m tests.patches.sweep first.")
        return row

    def count(self, how: str, listed: Iterable[Case]) -> Counter[str]:
        return Counter(self.of(case, how).verdict for case in listed)


def class_rows(found: Found) -> str:
    """A line for each class: the verdicts of all ways, and the reasons."""
    head = ["class", "type", "patched", "named", *OPTIONS, "worst", "how", "why"]
    lines = [head, ["---"] * len(head)]
    for case in found.listed:
        patch = found.of(case, "patch")
        ways = [found.of(case, how) for how in ("patch", "name", *(OPTIONS if case.takes_options else ()))]
        ways = ways[:1] if patch.verdict in NEVER else ways
        verdicts = [row.verdict for row in ways]
        reasons = [why(row) for row in ways if row.how != "name"]
        worst = max((row.worst for row in ways if "exact" in row.forms.values()), default=0.0)
        bound = f"{10.0 ** math.ceil(math.log10(worst)):.0e}" if worst else ""  # digits change from run to run
        note = f" ({patch.note[:120]})" if patch.note else ""
        said = "; ".join(dict.fromkeys(filter(None, reasons))) + note
        lines.append([case.name, case.model_type, *verdicts, *[""] * (4 - len(verdicts)), bound, patch.means, said])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def why(row: Row, longest: int = 160) -> str:
    """The reason in a row: what the proof found, or the first sentence of a refusal, up to what is to be done."""
    if row.verdict == "exact":
        return ""
    said = row.reason.partition("can't be packed exactly: ")[2] or row.reason
    for word in ("when patched: ", "UnsupportedModelError: ", "ValueError: "):
        said = said.replace(word, "")
    found = said.partition("don't stay apart: ")[2]
    said = re.sub(r"^(\w+): (?=\d)", r"in a trial \1 differ: ", found) or said
    said = said.partition(". ")[0].partition(", so ")[0].rstrip(".")
    return said if len(said) <= longest else said[: longest - 3] + "..."


def sentence(found: Found, version: str) -> str:
    """What the README says of all classes."""
    seen = found.count("patch", cases())
    built = sum(seen[verdict] for verdict in COLUMNS[:-1])
    return (
        f"Of the {built:,} pairs of a class and a model type for text in transformers' auto classes ({version}) "
        f"tritonpack packs {seen['exact']:,} exactly, {seen['partly']:,} exactly or not at all (classifiers of "
        f"sequences), refuses {seen['refused']:,}, and gets {seen['wrong'] + seen['error'] or 'none'} wrong."
    )


def page(found: Found, version: str) -> str:
    reasons: dict[str, list[str]] = {}  # of classes without text
    for case in sorted(cases(), key=lambda case: case.name):
        if (row := found.of(case, "patch")).verdict == "no text" and case.name not in reasons.get(row.reason, ()):
            reasons.setdefault(row.reason, []).append(case.name)
    left_out = "\n".join(f"- {reason}: {', '.join(names)}." for reason, names in sorted(reasons.items()))
    exact = [case for case in found.listed if case.takes_options and found.of(case, "patch").verdict == "exact"]
    lines = []
    for how, of in (("patch", found.listed), ("name", found.listed), *((option, exact) for option in OPTIONS)):
        seen = found.count(how, of)
        named = COLUMNS if how in ("patch", "name") else OF_OPTIONS
        counts = ", ".join(f"{seen[verdict]} {verdict}" for verdict in named if seen[verdict] or verdict == "wrong")
        classes = "pairs of class and model type" if of is found.listed else "causal classes that are packed exactly"
        lines.append(f"- **{how}**, of {len(of)} {classes}: {counts}.")
    return PAGE.read_text().format(
        version=version, count=len(forms.ALL), names=", ".join(forms.ALL).replace("_", " "),
        verdicts="\n".join(lines), rows=class_rows(found), left_out=left_out,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.patches.table", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/models.md"))
    parser.add_argument("--shown", type=Path, default=SHOWN)
    options = parser.parse_args()
    found = Found(results.load(options.results, transformers.__version__))
    options.out.write_text(page(found, transformers.__version__))
    results.save_shown(results.load(options.results), options.shown)
    print(sentence(found, transformers.__version__))
    print(f"{options.out} and {options.shown} written")


if __name__ == "__main__":
    main()
