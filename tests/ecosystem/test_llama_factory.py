"""Batches in LLaMA-Factory's formats, and a run of LLaMA-Factory itself, patched and not.

Its `neat_packing` numbers a row's documents 1, 2, 3 in the mask, 0 for padding, and restarts position ids. With
attention other than FlashAttention-2 its collator makes a mask of pairs (B, 1, T, T) of the numbers: 0 where a token
sees another, the dtype's minimum elsewhere. With FlashAttention-2 it passes no mask and cuts the padding off.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import tritonpack
from tests.ecosystem.training import EXACT, arguments, difference, features, outcome, tokenizer
from tests.patches.models import tiny_model

ROWS = ((9, 2, 23), (4, 14, 11, 1))
LENGTH = 36


def batch() -> dict[str, Tensor]:
    """Two rows of `neat_packing`, padded on the right; the first label of each document counts, too."""
    documents, rows = iter(features(ROWS[0] + ROWS[1])), []
    for row in ROWS:
        ids = [next(documents)["input_ids"] for _ in row]
        columns = {
            "input_ids": [token for one in ids for token in one],
            "attention_mask": [i for i, n in enumerate(row, 1) for _ in range(n)],
            "position_ids": [i for n in row for i in range(n)],
            "labels": [x for one in ids for x in (-100, *one[1:])],
        }
        rows.append({name: x + [-100 if name == "labels" else 0] * (LENGTH - sum(row)) for name, x in columns.items()})
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def of_pairs(numbers: Tensor) -> Tensor:
    """Which token sees which, (B, 1, T, T) bool, from the numbers of documents (B, T)."""
    one_document = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (numbers != 0)[:, None, None, :]
    return one_document & torch.ones(numbers.shape[1], numbers.shape[1], dtype=torch.bool).tril()


def added(pairs: Tensor, dtype: torch.dtype, hidden: float | None = None) -> Tensor:
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(pairs.shape, dtype=dtype).masked_fill(~pairs, hidden)


FORMS: dict[str, Any] = {
    "numbers": lambda numbers: numbers,
    "bfloat16": lambda numbers: added(of_pairs(numbers), torch.bfloat16),
    "minus infinity": lambda numbers: added(of_pairs(numbers), torch.float64, -torch.inf),
    "bool": of_pairs,
}


def alone() -> list[dict[str, Tensor]]:
    documents = [torch.tensor([document["input_ids"]]) for document in features(ROWS[0] + ROWS[1])]
    return [{"input_ids": ids, "labels": ids} for ids in documents]


@pytest.mark.fast("numbers-", "minus infinity-", "bool-no position ids")
@pytest.mark.parametrize("positions", [True, False], ids=["", "no position ids"])
@pytest.mark.parametrize("form", FORMS)
def test_documents_stay_apart(form: str, positions: bool) -> None:
    """The tiny Mistral has a window, which a mask of pairs must not switch off."""
    model = tiny_model("mistral")
    want = outcome(model, *alone())
    tritonpack.patch(model)
    call = batch()
    call["attention_mask"] = FORMS[form](call["attention_mask"])
    if not positions:
        del call["position_ids"]
    assert difference(outcome(model, call), want) < EXACT


def pairs() -> Tensor:
    return of_pairs(batch()["attention_mask"])


def seeing(query: int, key: int) -> Tensor:
    mask = pairs()
    mask[1, 0, query, key] ^= True
    return mask


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
BEGINLESS = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool).index_fill(3, torch.tensor([3, 4]), True)
UNBROKEN = torch.arange(LENGTH).expand(2, -1)
CONTRADICTION = "attention_mask and position_ids contradict each other"
# A mask or changed arguments, and words of the refusal
BAD: list[tuple[Any, str]] = [
    (seeing(10, 2), r"t block-diagonal and causal \(row 1, token 10\)"),
    (seeing(10, 11), r"\(row 1, token 10\)"),
    (seeing(10, 6), r"\(row 1, token 10\)"),
    (pairs() & CAUSAL.triu(-7), r"\(row 0, token 8\).*Windows and images come from the model"),
    (pairs() | pairs().mT, r"isn't block-diagonal and causal \(row 0, token 0\)"),
    (BEGINLESS, r"\(row 0, token 0\)"),
    (added(pairs(), torch.float32, -1e4), "addends other than 0"),
    (added(pairs(), torch.float32, torch.nan), "addends other than 0"),
    (pairs().long(), r"Convert integers with mask\.bool\(\)"),
    (pairs().expand(2, 4, -1, -1), r"of shape \(2, 1, 36, 36\), one for"),
    (pairs()[..., 1:], r"got attention_mask \(2, 1, 36, 35\)"),
    ({"attention_mask": pairs(), "position_ids": UNBROKEN}, CONTRADICTION),
    (CAUSAL[None, None], CONTRADICTION),  # positions that restart under one document
    (pairs()[:, 0], "makes masks of pairs of tokens itself"),
]


def test_other_masks_are_refused() -> None:
    """In a call with a cache also a square mask of the new tokens alone, which says nothing about the others."""
    model = tiny_model("mistral")
    tritonpack.patch(model)
    for given, message in BAD:
        with pytest.raises(ValueError, match=message):
            model(**batch() | (given if isinstance(given, dict) else {"attention_mask": given}))
    ids = batch()["input_ids"]
    for keys in (6, 12):
        cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        mask = torch.ones(1, 1, 6, keys, dtype=torch.bool).tril(keys - 6)
        with pytest.raises(ValueError, match="cache"):
            model(input_ids=ids[:, 6:12], attention_mask=mask, past_key_values=cache)


class Patch(TrainerCallback):
    """The recipe of docs/ecosystem.md."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.report = tritonpack.patch(model).report


class Logs(TrainerCallback):
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("neat", [True, False], ids=["neat_packing", "packing"])
def test_llama_factory_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neat: bool) -> None:
    """LLaMA-Factory trains a patched model as it trains a stock one with its masks of pairs.

    Its `packing` alone means that documents see each other; patched, position ids that restart keep them apart.
    """
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    tuner = pytest.importorskip("llamafactory.train.tuner", exc_type=ImportError)
    tokenizer().save_pretrained(tmp_path / "model")
    model = tiny_model("llama").float()
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    texts = [" ".join(f"w{token}" for token in document["input_ids"]) for document in features()]
    (tmp_path / "documents.json").write_text(json.dumps([{"instruction": x, "input": "", "output": x} for x in texts]))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"documents": {"file_name": "documents.json"}}))
    options = {
        **arguments(tmp_path / "out", per_device_train_batch_size=2, overwrite_output_dir=True),
        "model_name_or_path": str(tmp_path / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "documents", "dataset_dir": str(tmp_path), "template": "empty", "cutoff_len": 128,
        "packing": True, "flash_attn": "sdpa", "overwrite_cache": True, "preprocessing_num_workers": 1,
    }  # fmt: skip
    stock, logs, patch = Logs(), Logs(), Patch()
    tuner.run_exp({**options, "neat_packing": True}, callbacks=[stock])
    tuner.run_exp({**options, "neat_packing": neat}, callbacks=[patch, logs])
    assert patch.report.attention == "tritonpack"
    assert logs.losses == pytest.approx(stock.losses, rel=EXACT)
    assert len(logs.losses) == 3
