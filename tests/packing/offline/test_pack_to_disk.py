import collections
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

import datasets

from tests.packing.offline.tables import LENGTHS, documents, documents_of, random_documents, write_files
from tritonpack import PackingCollator, pack, pack_dataset, pack_to_disk
from tritonpack.packing.offline import open_source, sources

KINDS = ("arrow", "feather", "parquet", "jsonl")


def by_tokens(found):
    return sorted(found, key=lambda document: document["input_ids"])


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a few documents."""
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    monkeypatch.setattr(open_source, "PART_BYTES", 100)


def sources_of(folder, given):
    """The same documents in every form that is read."""
    table = datasets.Dataset.from_list(given)
    table.save_to_disk(folder / "saved", num_shards=3)
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(folder / "splits")
    backwards = datasets.Dataset.from_list(given[::-1])
    yield {"dataset": str(folder / "saved")}
    yield {"dataset": folder / "splits", "split": "train"}
    yield {"dataset": table}
    yield {"dataset": backwards.select(range(len(given) - 1, -1, -1)).with_format("torch")}
    yield {"dataset": table.to_iterable_dataset(num_shards=2)}
    yield {"dataset": datasets.IterableDataset.from_generator(lambda: iter(given))}
    for kind in KINDS:
        yield {"dataset": str(write_files(folder / kind, kind, given))}
    yield {"dataset": str(folder / "jsonl" / "*.jsonl")}


@pytest.mark.heavy
def test_every_source_gives_the_same_rows(tmp_path, small_parts):
    given = documents()
    packing = pack(LENGTHS, 10)
    expected = [[given[number] for number in items] for items in packing]
    for number, source in enumerate(sources_of(tmp_path, given)):
        out = tmp_path / f"out-{number}"
        found = pack_to_disk(capacity=10, out=out, seed=None, shard_bytes=200, **source)
        rows = datasets.load_from_disk(str(out))
        assert (found.documents, found.tokens, found.rows) == (len(given), sum(LENGTHS), packing.num_bins)
        cut = documents_of(rows)
        assert [[document for at, document in cut if at == row] for row in range(len(rows))] == expected, source
        assert len(list(out.glob("*.arrow"))) > 1
        assert not (out / ".packing").exists()


@pytest.mark.parametrize("algorithm", ["best_fit_decreasing", "first_fit", "next_fit", "windowed"])
def test_rows_are_those_of_pack_shuffled(tmp_path, algorithm):
    given = random_documents(300, 40)
    lengths = [len(document["input_ids"]) for document in given]
    source = datasets.Dataset.from_list(given)
    packing = pack(lengths, 64, algorithm=algorithm, max_items=5)
    expected = [[given[number] for number in items] for items in packing]
    orders = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        found = pack_to_disk(source, 64, out, algorithm=algorithm, max_items=5, seed=seed, shard_bytes=5000)
        assert (found.efficiency, found.lower_bound) == (packing.efficiency, packing.lower_bound)
        cut = documents_of(datasets.load_from_disk(str(out)))
        orders.append([[document for at, document in cut if at == row] for row in range(found.rows)])
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[1])) == sorted(map(str, expected))
    assert orders[0] != orders[1] != expected


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_documents_longer_than_a_row(tmp_path, small_parts, overlong):
    given = documents()
    source = write_files(tmp_path / "in", "parquet", given)
    found = pack_to_disk(source, 4, tmp_path / "out", overlong=overlong, shard_bytes=200)
    pieces = [
        {name: values[start : start + 4] for name, values in document.items()}
        for document in given
        for start in range(0, len(document["input_ids"]), 4)
        if overlong == "split" or len(document["input_ids"]) <= 4 or (overlong == "truncate" and start == 0)
    ]
    cut = [document for _, document in documents_of(datasets.load_from_disk(str(tmp_path / "out")))]
    assert by_tokens(cut) == by_tokens(pieces)
    report = pack(LENGTHS, 4, overlong=overlong).report
    assert found.report == report
    assert (found.tokens, found.row_documents) == (sum(LENGTHS), len(pieces))
    assert found.row_tokens == sum(LENGTHS) - report.tokens_lost


def test_overlong_documents_are_refused_by_default(tmp_path):
    source = datasets.Dataset.from_list(documents())
    with pytest.raises(ValueError, match=r"8 of 14 documents are longer .* The longest is document 10: 10 tokens\."):
        pack_to_disk(source, 4, tmp_path / "out")
    assert pack_to_disk(source, 4, tmp_path / "out", overlong="split").rows == 18, "the same folder, with a remedy"


def test_mended_documents_begin_anew(tmp_path):
    path = write_files(tmp_path / "in", "jsonl", documents())
    text = (path / "1.jsonl").read_text()
    (path / "1.jsonl").write_text(text.replace("[-100, ", "[", 1))
    with pytest.raises(ValueError, match=r"line 1 of .*1\.jsonl: labels has 7 values for 8 tokens"):
        pack_to_disk(path, 10, tmp_path / "out")
    (path / "1.jsonl").write_text(text)
    (path / "0.jsonl").write_text((path / "0.jsonl").read_text().partition("\n")[2])
    assert pack_to_disk(path, 10, tmp_path / "out").documents == 13


def test_columns_of_rows(tmp_path):
    given = [
        {
            "input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "completion_mask": [0, 1, 1], "length": 3,
            "box": [[1], [2], [3]],
        },
        {"input_ids": [4], "attention_mask": [1], "completion_mask": [1], "length": 1, "box": [[4]]},
    ]  # fmt: skip
    source = datasets.Dataset.from_list(given)
    found = pack_to_disk(source, 4, tmp_path / "out", columns=["input_ids", "completion_mask", "box"])
    assert found.columns == ("input_ids", "box", "labels", "position_ids", "seq_lengths")
    assert (found.labels_from, found.left_out) == (("completion_mask",), ("attention_mask", "length"))
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    assert rows[0] == {
        "input_ids": [1, 2, 3, 4], "box": [[1], [2], [3], [4]], "labels": [-100, 2, 3, 4],
        "position_ids": [0, 1, 2, 0], "seq_lengths": [3, 1],
    }  # fmt: skip
    assert {name: rows.features[name].feature.dtype for name in ("input_ids", "labels", "position_ids")} == {
        "input_ids": "int32", "labels": "int32", "position_ids": "uint16",
    }  # fmt: skip


@pytest.mark.parametrize("capacity", [2**16, 2**16 + 1])
def test_positions_of_long_documents(tmp_path, capacity):
    source = datasets.Dataset.from_dict({"input_ids": [[1] * capacity]})
    pack_to_disk(source, capacity, tmp_path / "out")
    assert datasets.load_from_disk(str(tmp_path / "out"))[0]["position_ids"] == list(range(capacity))


def test_masks_stay_beside_labels(tmp_path):
    given = documents([2, 3])
    given = [document | {"assistant_masks": [1] * len(document["input_ids"])} for document in given]
    found = pack_to_disk(datasets.Dataset.from_list(given), 5, tmp_path / "out")
    assert found.labels_from == ()
    assert by_tokens([document for _, document in documents_of(datasets.load_from_disk(str(found.path)))]) == given


def test_batches_are_those_of_the_documents(tmp_path):
    given = documents()
    pack_to_disk(datasets.Dataset.from_list(given), 10, tmp_path / "out", seed=None)
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    bins = [[given[number] for number in items] for items in pack(LENGTHS, 10)]
    for form in (None, "numpy", "torch"):
        for row, items in zip(rows.with_format(form), bins, strict=True):
            actual, expected = PackingCollator()([row]), PackingCollator()(items)
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert (actual[name] == value).all() if hasattr(value, "all") else actual[name] == value


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("stream", marks=pytest.mark.slow)])
def test_interrupted_at_any_moment_it_goes_on_to_the_same_files(tmp_path, small_parts, monkeypatch, kind):
    """Every replacement of a temporary file fails once, before or after it is done."""
    given = random_documents(16, 9)
    path = write_files(tmp_path / "in", "jsonl", given)

    def source():
        return str(path) if kind == "jsonl" else datasets.IterableDataset.from_generator(lambda: iter(given))

    options = {"capacity": 10, "overlong": "split", "shard_bytes": 400}
    pack_to_disk(source(), out=tmp_path / "whole", **options)
    replace, calls = os.replace, collections.Counter()

    def interrupted(start, target):
        calls[target] += 1
        if calls[target] == 1:
            raise InterruptionError
        replace(start, target)
        if calls[target] == 2:
            raise InterruptionError

    monkeypatch.setattr(os, "replace", interrupted)
    interruptions = 0
    for _ in range(1000):
        try:
            pack_to_disk(source(), out=tmp_path / "out", **options)
            break
        except InterruptionError:
            interruptions += 1
    assert interruptions > 10
    assert min(calls.values()) >= 2
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    steps = []
    pack_to_disk(source(), out=tmp_path / "out", progress=lambda *step: steps.append(step), **options)
    assert steps == [], "a complete folder needs no work"


class TestOtherStream:
    """Streams of the same type, whose documents differ."""

    @staticmethod
    def stream(first, count):
        numbers = range(first, first + count)
        return datasets.IterableDataset.from_generator(lambda: ({"input_ids": [number] * 2} for number in numbers))

    def test_complete_folder_is_refused(self, tmp_path):
        pack_to_disk(self.stream(0, 100), 8, tmp_path)
        assert pack_to_disk(self.stream(0, 100), 8, tmp_path).documents == 100
        for other in (self.stream(1, 100), self.stream(0, 101)):
            with pytest.raises(ValueError, match="the documents aren't those that it was begun with"):
                pack_to_disk(other, 8, tmp_path)

    @pytest.mark.parametrize("step", ["copy", "measure"])
    def test_copy_of_another_stream_is_removed(self, tmp_path, monkeypatch, step):
        monkeypatch.setattr(open_source, "PART_BYTES", 100)

        def stop(at, done, parts):
            if at == step and done:
                raise InterruptionError

        with pytest.raises(InterruptionError):
            pack_to_disk(self.stream(0, 2500), 8, tmp_path, progress=stop)
        assert list((tmp_path / ".packing").glob("stream-*"))
        pack_to_disk(self.stream(10_000, 1200), 8, tmp_path)
        tokens = {token for row in datasets.load_from_disk(str(tmp_path)) for token in row["input_ids"]}
        assert tokens == set(range(10_000, 11_200))


@pytest.mark.parametrize("limit", [1000, 8400, 20_000, 60_000])
def test_full_disk_names_the_file_and_the_remedy(tmp_path, limit):
    source = datasets.Dataset.from_dict({"input_ids": [[1] * 100] * 100 + [[1]] * 2000})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # of bytes in a file; fails as a full disk does
    try:
        with pytest.raises(OSError, match=rf"; free space in {tmp_path}.* and run the same command again: .*\.\w+'"):
            pack_to_disk(source, 128, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.rglob("*.tmp"))
    assert pack_to_disk(source, 128, tmp_path).documents == 2100


PROGRAM = """
import sys, tritonpack
from tritonpack.packing.offline import sources
sources.PART_BYTES = 10_000
tritonpack.pack_to_disk(sys.argv[1], 512, sys.argv[2], jobs=2, shard_bytes=50_000)
"""


@pytest.mark.slow
def test_killed_process_goes_on_to_the_same_files(tmp_path):
    source = write_files(tmp_path / "in", "parquet", random_documents(4000, 200), files=20)
    command = [sys.executable, "-c", PROGRAM, str(source)]
    root = Path(__file__).parents[3]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, cwd=root)
    generator, killed = np.random.default_rng(0), 0
    for _ in range(4):
        process = subprocess.Popen([*command, str(tmp_path / "out")], cwd=root)
        before, more = len(list((tmp_path / "out").rglob("*.*"))), generator.integers(1, 12)
        while process.poll() is None and len(list((tmp_path / "out").rglob("*.*"))) < before + more:
            time.sleep(0.001)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
    assert killed
    subprocess.run([*command, str(tmp_path / "out")], check=True, cwd=root)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_jobs_change_nothing(tmp_path, small_parts):
    source = write_files(tmp_path / "in", "arrow", random_documents(60, 30))
    for jobs in (1, 4):
        pack_to_disk(source, 64, tmp_path / str(jobs), jobs=jobs, shard_bytes=4000)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "4")


class TestRefusals:
    def test_other_settings_and_documents(self, tmp_path):
        source = datasets.Dataset.from_list(documents())
        out = tmp_path / "out"
        pack_to_disk(source, 10, out)
        with pytest.raises(
            ValueError, match=r"holds another packing: capacity was 10 and is 12; seed was 0 and is 1\. "
        ):
            pack_to_disk(source, 12, out, seed=1)
        with pytest.raises(
            ValueError, match="holds another packing: the documents aren't those that it was begun with"
        ):
            pack_to_disk(source.select(range(3)), 10, out)

    def test_changed_file_is_named(self, tmp_path):
        path, out = write_files(tmp_path / "in", "jsonl", documents()), tmp_path / "out"
        pack_to_disk(path, 10, out)
        os.utime(path / "1.jsonl", (0, 0))
        with pytest.raises(ValueError, match=r"begun with \(1\.jsonl has the same size, but was .* touched at another"):
            pack_to_disk(path, 10, out)
        assert len(datasets.load_from_disk(str(out)))
        size = (path / "0.jsonl").stat().st_size
        (path / "0.jsonl").write_text((path / "0.jsonl").read_text() + "\n")
        with pytest.raises(ValueError, match=rf"begun with \(0\.jsonl had {size} bytes and has {size + 1}\)"):
            pack_to_disk(path, 10, out)
        (path / "0.jsonl").rename(path / "7.jsonl")
        with pytest.raises(ValueError, match=r"begun with \(0\.jsonl is gone\)"):
            pack_to_disk(path, 10, out)
        (path / "7.jsonl").rename(path / "0.jsonl")
        (path / "7.jsonl").write_text('{"input_ids": [1], "labels": [1]}\n')
        with pytest.raises(ValueError, match=r"begun with \(7\.jsonl is new\)"):
            pack_to_disk(path, 10, out)

    def test_changed_file_with_the_name_of_another(self, tmp_path):
        for name in "ab":
            write_files(tmp_path / "in" / name, "jsonl", documents(), files=1)
        pack_to_disk(tmp_path / "in", 10, tmp_path / "out")
        os.utime(tmp_path / "in" / "a" / "0.jsonl", (0, 0))
        with pytest.raises(ValueError, match=r"begun with \(a/0\.jsonl has the same size"):
            pack_to_disk(tmp_path / "in", 10, tmp_path / "out")

    def test_other_settings_when_interrupted(self, tmp_path):
        path = write_files(tmp_path / "in", "jsonl", documents())

        def stop(step, done, parts):
            if step == "sort":
                raise InterruptionError

        with pytest.raises(InterruptionError):
            pack_to_disk(path, 10, tmp_path / "out", progress=stop)
        with pytest.raises(
            ValueError, match="holds the beginning of another packing: overlong was 'error' and is 'drop'"
        ):
            pack_to_disk(path, 10, tmp_path / "out", overlong="drop")
        (path / "0.jsonl").write_text('{"input_ids": [1], "labels": [1]}\n')
        with pytest.raises(ValueError, match="the documents aren't those"):
            pack_to_disk(path, 10, tmp_path / "out")

    def test_damaged_files_of_a_complete_folder(self, tmp_path):
        source = datasets.Dataset.from_list(documents())
        pack_to_disk(source, 10, tmp_path, shard_bytes=200)
        for file in [*tmp_path.glob("*.arrow"), tmp_path / "state.json", tmp_path / "dataset_info.json"]:
            content = file.read_bytes()
            file.write_bytes(content[:-1])
            size = len(content)
            with pytest.raises(
                ValueError, match=f"{file.name} has {size - 1:,} bytes, but was written with {size:,}; rem"
            ):
                pack_to_disk(source, 10, tmp_path, shard_bytes=200)
            file.unlink()
            with pytest.raises(
                ValueError, match=f"{file.name} is missing; remove the folder {tmp_path} and pack again"
            ):
                pack_to_disk(source, 10, tmp_path, shard_bytes=200)
            file.write_bytes(content)
        assert pack_to_disk(source, 10, tmp_path, shard_bytes=200).documents == len(LENGTHS)

    def test_version_that_plans_other_rows(self, tmp_path, monkeypatch):
        source = datasets.Dataset.from_list(documents())

        def stop(step, done, parts):
            if step == "sort":
                raise InterruptionError

        with pytest.raises(InterruptionError):
            pack_to_disk(source, 10, tmp_path / "out", progress=stop)
        record = tmp_path / "out" / "packing.json"
        record.write_text(record.read_text().replace('"plan": "', '"plan": "0'))
        with pytest.raises(ValueError, match="a version of tritonpack or NumPy that makes other rows"):
            pack_to_disk(source, 10, tmp_path / "out")

    def test_folder_of_something_else(self, tmp_path):
        source = datasets.Dataset.from_list(documents())
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="is a file; name a folder"):
            pack_to_disk(source, 10, tmp_path / "file")
        with pytest.raises(ValueError, match="isn't empty and holds no packing that could be continued"):
            pack_to_disk(source, 10, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_folder_within_the_documents(self, tmp_path):
        path = write_files(tmp_path / "in", "jsonl", documents())
        with pytest.raises(ValueError, match=r"out=.*rows lies in .*in, whose files are the documents"):
            pack_to_disk(path, 10, path / "rows")

    def test_folder_in_use(self, tmp_path):
        source = datasets.Dataset.from_list(documents())

        def again(step, done, parts):
            with pytest.raises(ValueError, match="another process packs into"):
                pack_to_disk(source, 10, tmp_path / "out")

        pack_to_disk(source, 10, tmp_path / "out", progress=again)

    def test_documents_that_change_meanwhile(self, tmp_path):
        path = write_files(tmp_path / "in", "jsonl", documents())

        def change(step, done, parts):
            if step == "plan":
                (path / "1.jsonl").write_text((path / "1.jsonl").read_text().partition("\n")[2])

        with pytest.raises(ValueError, match=r"line 1 of .*1\.jsonl, or a document after it, has changed since"):
            pack_to_disk(path, 10, tmp_path / "out", progress=change)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"dataset": [{"input_ids": [1]}]}, r"got list\. Of other documents make one: datasets.Dataset.from_list"),
            ({"capacity": 0}, "capacity must be an integer from 1"),
            ({"overlong": "cut"}, "overlong"),
            ({"algorithm": "magic"}, "algorithm"),
            ({"seed": -1}, "seed must be an integer from 0"),
            ({"jobs": 0}, "jobs must be an integer from 1"),
            ({"shard_bytes": 0}, "shard_bytes must be an integer of at least 1"),
            ({"columns": "input_ids"}, r"columns must be a list of names, .*; got 'input_ids'"),
            ({"split": "train"}, r"split='train' is for paths and names; pass dataset\['train'\]"),
        ],
    )
    def test_arguments(self, tmp_path, given, message):
        source = datasets.Dataset.from_list(documents())
        with pytest.raises(ValueError, match=message):
            pack_to_disk(**({"dataset": source, "capacity": 10, "out": tmp_path / "out"} | given))
        assert not (tmp_path / "out").exists()

    def test_splits(self, tmp_path):
        table = datasets.Dataset.from_list(documents())
        for number, given in enumerate([table, table.to_iterable_dataset()]):
            kind = datasets.DatasetDict if given is table else datasets.IterableDatasetDict
            splits = kind(train=given, test=given)
            out = tmp_path / str(number)
            with pytest.raises(ValueError, match=r"has the splits train, test; name one of them as split\."):
                pack_to_disk(splits, 10, out)
            with pytest.raises(ValueError, match="train, test; name one of them as split; got 'dev'"):
                pack_to_disk(splits, 10, out, split="dev")
            assert pack_to_disk(splits, 10, out, split="test").documents == len(LENGTHS)
            with pytest.raises(ValueError, match=r"Pass one of its datasets: dataset\['train'\] or dataset\['test"):
                pack_dataset(splits, 10)

    def test_transform(self, tmp_path):
        source = datasets.Dataset.from_list(documents()).with_transform(lambda batch: batch)
        with pytest.raises(ValueError, match=r"has a transform .*: dataset\.map\(function, batched=True\)"):
            pack_to_disk(source, 10, tmp_path / "out")


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r"pack_to_disk reads and writes with pyarrow and datasets.*pip install datasets"
    ):
        pack_to_disk("x", 10, tmp_path / "out")
