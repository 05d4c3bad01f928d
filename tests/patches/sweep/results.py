"""What the sweep found, as rows of a file: one for each class, model type, version of transformers and way of asking."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import transformers

from tests.patches.sweep.forms import ALL

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
SHOWN = HERE.parents[2] / "tritonpack" / "patches" / "shown.csv"

# Verdicts of a form, and of a class the worst of its forms; the worst first.
WRONG = ("leak", "inexact", "shape")
VERDICTS = (*WRONG, "error", "partly", "refused", "exact", "stock", "not built", "no text")
HOWS = ("patch", "name", "stock")
ANY = "any"  # how, where it is the same for all
REST = "the rest"


@dataclasses.dataclass
class Row:
    """What became of a class.

    Attributes:
        key: "class/model type".
        how: "patch" by `tritonpack.patch()`, "name" by `attn_implementation`, "stock" as it is, or "any".
        verdict: one of `VERDICTS`; the worst of `forms`. "leak": tokens of one document move the values of another;
            "inexact": a document differs from itself alone, and no other moves it; "shape": an output has no value for
            each token or document; "error": one that isn't tritonpack's; "refused" by tritonpack, always; "partly": in
            some forms, and exact in others; "stock": a form that fails without tritonpack, too, or is wrong.
        reason: the form with the number, or the message, behind any verdict but "exact".
        forms: the verdict of every form that was tried.
        worst: the largest difference from documents alone among exact forms, relative to the largest value.
        numbers: that of each form that is wrong.
        note: what was left out, and why.
        means: what a patch does for the model.
        version: of transformers.
    """

    key: str
    how: str
    verdict: str
    reason: str = ""
    forms: dict[str, str] = dataclasses.field(default_factory=dict)
    worst: float = 0.0
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    means: str = ""
    seconds: float = 0.0
    version: str = transformers.__version__

    @property
    def name(self) -> str:
        return self.key.partition("/")[0]

    @property
    def model_type(self) -> str:
        return self.key.partition("/")[2]

    @property
    def wrong(self) -> bool:
        return self.verdict in WRONG

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.version, self.key, self.how


def to_line(row: Row) -> str:
    """One line of JSON; fields that hold nothing are left out, and forms are grouped by verdict. Where all forms were
    tried, the largest group has the name `REST`."""
    fields = {name: value for name, value in dataclasses.asdict(row).items() if value}
    if row.forms:
        counted = Counter(row.forms.values())
        groups = {v: " ".join(form for form, x in row.forms.items() if x == v) for v in counted}
        if row.forms.keys() == {*ALL}:
            groups[counted.most_common(1)[0][0]] = REST
        fields["forms"] = groups
    for name, digits in (("worst", 1), ("seconds", 2)):
        if name in fields:
            fields[name] = float(f"{fields[name]:.{digits}e}") if name == "worst" else round(fields[name], digits)
    if row.numbers:
        fields["numbers"] = {form: float(f"{number:.1e}") for form, number in row.numbers.items()}
    return json.dumps(fields, separators=(",", ":"))


def from_line(line: str) -> Row:
    fields = json.loads(line)
    groups = fields.pop("forms", {})
    named = {form: verdict for verdict, names in groups.items() if names != REST for form in names.split()}
    rest = next((verdict for verdict, names in groups.items() if names == REST), None)
    if rest is not None:
        named = {form: named.get(form, rest) for form in ALL}
    return Row(**fields, forms=named)


def load(path: Path = RESULTS, version: str | None = None) -> list[Row]:
    """The rows of one version, or of all; of rows of the same class the last, and the newer of "any" and the others."""
    found: dict[tuple[str, str, str], Row] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = from_line(line)
            others = HOWS if row.how == ANY else (ANY,)
            for how in others:
                found.pop((row.version, row.key, how), None)
            found[row.identity] = row
    return [row for row in found.values() if version in (None, row.version)]


def save(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Rows in order of version, type and class."""
    ordered = sorted(rows, key=lambda row: (row.version, row.model_type, row.name, row.how))
    path.write_text("".join(to_line(row) + "\n" for row in ordered))


def append(row: Row, path: Path = RESULTS) -> None:
    with path.open("a") as file:
        file.write(to_line(row) + "\n")


def shown(rows: Iterable[Row]) -> dict[str, set[str]]:
    """{class: "major.minor" versions of transformers for which the sweep shows it}: never wrong, and not always refused,
    whatever type it was built for."""
    verdicts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.how == "patch":
            minor = ".".join(row.version.split(".")[:2])
            verdicts.setdefault((row.name, minor), []).append(row.verdict)
    found: dict[str, set[str]] = {}
    for (name, minor), seen in verdicts.items():
        if set(seen) <= {"exact", "partly"}:
            found.setdefault(name, set()).add(minor)
    return found


def save_shown(rows: Iterable[Row], path: Path = SHOWN) -> None:
    """Write the table of shown classes. Entries of versions that have no rows stay as they are."""
    rows = list(rows)
    covered = {".".join(row.version.split(".")[:2]) for row in rows}
    table = shown(rows)
    if path.exists():
        with path.open(newline="") as file:
            for entry in csv.DictReader(file):
                kept = set(entry["versions"].split()) - covered
                if kept:
                    table.setdefault(entry["class"], set()).update(kept)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["class", "versions"])
        for name in sorted(table):
            writer.writerow([name, " ".join(sorted(table[name], key=lambda v: tuple(map(int, v.split(".")))))])
