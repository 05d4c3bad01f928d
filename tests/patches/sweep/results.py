"""The results of the sweep: a file for each version of transformers, a row for each class, model type and `how`."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import transformers

from tests.patches.sweep.forms import ALL, COMPACTED

HERE = Path(__file__).parent
RESULTS = HERE / "results"  # a folder: VERSION.jsonl
SHOWN = HERE.parents[2] / "tritonpack" / "patches" / "exact_classes.csv"

# Verdicts of a form, and of a class the worst of its forms; the worst first.
VERDICTS = ("wrong", "error", "partly", "refused", "as it is", "exact", "stock", "not built", "no text")
OPTIONS = ("unpad", "share_prefixes")  # of `tritonpack.patch`
HOWS = ("patch", "name", *OPTIONS)
NEVER = ("no text", "not built")  # verdicts that stand for every way, in the row of the first
REST, UNTRIED = "the rest", "untried"  # in the file


@dataclasses.dataclass
class Row:
    """The verdict on a class.

    Attributes:
        key: "class/model type".
        how: one of `HOWS`: by `tritonpack.patch()`, by `attn_implementation`, or with an option.
        verdict: the worst of `forms`. "wrong": a document differs from itself alone; "error": one that isn't
            tritonpack's; "partly": refused in some forms, exact in others; "as it is": exact, but an option saved no
            token; "stock": a form that fails without tritonpack, too, or is wrong.
        reason: the form with the number, or the message, for any verdict but "exact".
        worst: the largest difference from documents alone among exact forms, relative to the largest value.
        note: what was left out, and why.
        means: what a patch does for the model.
        proven: whether only its proof refuses what is wrong: the class must be proven in its first call.
        bare: whether the reason is a refusal that doesn't say what to do.
        version: the version of transformers; the name of the file.
    """

    key: str
    how: str
    verdict: str
    reason: str = ""
    forms: dict[str, str] = dataclasses.field(default_factory=dict)
    worst: float = 0.0
    note: str = ""
    means: str = ""
    proven: bool = False
    bare: bool = False
    seconds: float = 0.0
    version: str = transformers.__version__

    @property
    def name(self) -> str:
        return self.key.partition("/")[0]


def to_line(row: Row) -> str:
    """Return a row as one line of JSON, without empty fields and with forms by verdict; most have that of `REST`."""
    fields = {name: value for name, value in dataclasses.asdict(row).items() if value and name != "version"}
    if row.forms:
        verdicts = {form: row.forms.get(form, UNTRIED) for form in _forms(row.how)}
        groups = {v: " ".join(form for form in verdicts if verdicts[form] == v) for v in {*verdicts.values()}}
        groups[Counter(row.forms.values()).most_common(1)[0][0]] = REST
        fields["forms"] = dict(sorted(groups.items()))
    for name in fields.keys() & {"worst", "seconds"}:
        fields[name] = float(f"{fields[name]:.1e}")
    return json.dumps(fields, separators=(",", ":")) + "\n"


def from_line(line: str, version: str) -> Row:
    fields = {**json.loads(line), "version": version}
    groups = {forms: verdict for verdict, forms in fields.pop("forms", {}).items()}
    listed = {form: verdict for forms, verdict in groups.items() if forms != REST for form in forms.split()}
    verdicts = {form: listed.get(form, groups.get(REST, UNTRIED)) for form in _forms(fields["how"])}
    return Row(**fields, forms={form: verdict for form, verdict in verdicts.items() if verdict != UNTRIED})


def _forms(how: str) -> tuple[str, ...]:
    """Return the names of the forms that a row may have."""
    return COMPACTED if how in OPTIONS else ALL


def load(folder: Path = RESULTS, version: str | None = None) -> list[Row]:
    """Return the rows of one version, or of all: the last row of each class and `how`."""
    found: dict[tuple[str, str, str], Row] = {}
    for path in sorted(folder.glob(f"{version or '*'}.jsonl")):
        for line in path.read_text().splitlines():
            row = from_line(line, path.stem)
            found[row.version, row.key, row.how] = row
    return list(found.values())


def save(rows: Iterable[Row], folder: Path = RESULTS, *, version: str | None = None) -> None:
    """Write the files of all versions that have rows, in order of type and class, and that of `version` in any case."""
    files: dict[str, list[Row]] = {version: []} if version else {}
    for row in rows:
        files.setdefault(row.version, []).append(row)
    folder.mkdir(parents=True, exist_ok=True)
    for version, there in files.items():
        there.sort(key=lambda row: (row.key.partition("/")[::-1], row.how))
        (folder / f"{version}.jsonl").write_text("".join(map(to_line, there)))


def append(row: Row, folder: Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{row.version}.jsonl").open("a") as file:
        file.write(to_line(row))


def shown(rows: Iterable[Row], how: str = "patch") -> dict[str, set[str]]:
    """Return {class: "major.minor" versions of transformers} of shown classes.

    A shown class is never wrong, never an error and not always refused, for all its model types, without a proof. With
    an option it is always exact.
    """
    allowed, found, others = {"exact"} if how in OPTIONS else {"exact", "partly"}, dict[str, set[str]](), set()
    for row in rows:
        if row.how == how:
            found.setdefault(row.name, set()).add(_minor(row))
            others |= set() if row.verdict in allowed and not row.proven else {(row.name, _minor(row))}
    return {name: kept for name, all_ in found.items() if (kept := {v for v in all_ if (name, v) not in others})}


def save_shown(rows: Iterable[Row], path: Path = SHOWN) -> None:
    """Write the table of shown classes. Entries of versions that have no rows stay as they are."""
    rows = list(rows)
    covered = set(map(_minor, rows))
    tables = {"versions": shown(rows), "in_trees": shown(rows, "share_prefixes")}
    with path.open(newline="") as file:
        for entry in csv.DictReader(file):
            for column, table in tables.items():
                if kept := set(entry[column].split()) - covered:
                    table.setdefault(entry["class"], set()).update(kept)
    known, in_trees = tables.values()
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["class", *tables])
        for name in sorted(known):
            both = known[name] & in_trees.get(name, set())
            writer.writerow([name, *(" ".join(sorted(x, key=_order)) for x in (known[name], both))])


def _minor(row: Row) -> str:
    return ".".join(row.version.split(".")[:2])


def _order(version: str) -> list[int]:
    return [*map(int, version.split("."))]
