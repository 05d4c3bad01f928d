"""Every block of Python in the guides runs, given the objects that its page assumes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tritonpack

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = ("fine-tuning", "backends", "long-context", "patching")


def blocks(guide: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{guide}.md").read_text(encoding="utf-8"), re.DOTALL)


def my_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    return tritonpack.varlen_attention(q, k, v, mask, backend="blocked")


def given_to(guide: str, folder: Path) -> dict[str, Any]:
    """The objects that a page assumes."""
    given: dict[str, Any] = {"torch": torch, "tritonpack": tritonpack}
    if guide == "backends":
        mask = tritonpack.BlockDiagonalMask.from_seqlens([3, 5])
        return given | {"device": "cpu", "mask": mask, "my_attention": my_attention}
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    options = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
    dataset = [{"input_ids": [(start + i) % 61 + 3 for i in range(5 + start % 7)]} for start in range(24)]
    return given | {
        "model": transformers.LlamaForCausalLM(config),
        "dataset": dataset,
        "folder": folder,
        "options": {"output_dir": str(folder), "disable_tqdm": True, **options},
        "batch": tritonpack.PackingCollator()(dataset[:4]),
    }


@pytest.mark.parametrize(
    ("guide", "number"), [(guide, number) for guide in GUIDES for number in range(len(blocks(guide)))]
)
def test_block(guide: str, number: int, tmp_path: Path) -> None:
    code, given = blocks(guide)[number], given_to(guide, tmp_path)
    if "linear_cross_entropy" in code and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch 2.13 or later")
    if "Trainer(" in code:
        pytest.importorskip("accelerate")
    if "trl." in code:
        given["trl"], datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
        from tests.ecosystem.training import tokenizer

        given |= {"dataset": datasets.Dataset.from_list(given["dataset"]), "tokenizer": tokenizer()}
    elif "arguments" in code:
        given["arguments"] = pytest.importorskip("transformers").TrainingArguments(**given["options"])
    before = given.get("model") and {name: p.clone() for name, p in given["model"].named_parameters()}
    exec(compile(code, f"{guide}.md", "exec"), given)
    if "optimizer.step" in code or ".train()" in code:
        assert not all(torch.equal(p, before[name]) for name, p in given["model"].named_parameters())


def test_backends_page_merges_partial_results_and_finds_a_wrong_function(tmp_path: Path) -> None:
    """Merged pieces of keys equal the whole, and the loop over cases fails for a wrong function."""
    merges, loop = (next(block for block in blocks("backends") if part in block) for part in ("merged =", "my_atten"))
    given = given_to("backends", tmp_path)
    exec(merges, given)
    whole = tritonpack.BlockDiagonalMask.from_seqlens([40], causal=False)
    torch.testing.assert_close(given["merged"], tritonpack.varlen_attention(*(given[x] for x in "qkv"), whole))
    given = given_to("backends", tmp_path) | {"my_attention": lambda *args: my_attention(*args) * 1.001}
    with pytest.raises(AssertionError, match="beyond twice plain attention's error"):
        exec(loop, given)


def test_accumulated_gradients_equal_those_of_one_batch(tmp_path: Path) -> None:
    (code,) = (block for block in blocks("fine-tuning") if "num_items_in_batch" in block)
    given = given_to("fine-tuning", tmp_path)
    given["model"].double()
    exec(code, given)
    accumulated = [p.grad.clone() for p in given["model"].parameters()]
    given["model"].zero_grad()
    given["model"](**tritonpack.PackingCollator()(given["dataset"][:3])).loss.backward()
    torch.testing.assert_close([p.grad for p in given["model"].parameters()], accumulated, rtol=1e-5, atol=1e-9)


def test_proof_fails_without_the_patch(tmp_path: Path) -> None:
    (code,) = (block for block in blocks("fine-tuning") if "assert_close" in block)
    given = given_to("fine-tuning", tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        exec(code.replace("tritonpack.patch(model)", "torch.no_grad()"), given)


def test_trees_page() -> None:
    """It runs from top to bottom, and finds a mask that isn't the tree: in a causal one branches see each other."""
    torch.manual_seed(0)
    code = "".join(blocks("trees"))
    given: dict[str, Any] = {}
    exec(code, given)
    assert given["position_ids"].tolist() == [0, 1, 2, 3, 2, 3, 0, 1, 1, 0, 0]
    prompts = [torch.arange(2048) + 10**4 * number for number in range(4)]
    sequences = [torch.cat([prompt, torch.randint(2**17, (256,))]) for prompt in prompts for _ in range(8)]
    batch = tritonpack.pack_tree(sequences)
    assert (batch.num_tokens, len(batch.places)) == (16384, 73728)  # as the page says
    assert code.count("batch.mask") == 1
    with pytest.raises(AssertionError, match="not close"):
        exec(code.replace("batch.mask", "tritonpack.BlockDiagonalMask.from_seqlens([batch.num_tokens])"), {})


def test_padded_batches_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    given: dict[str, Any] = {}
    call, callback = blocks("padded-batches")
    exec(compile(call, "padded-batches.md", "exec"), given)
    assert capsys.readouterr().out == "26 of 68 tokens computed, 61.8% saved\n"

    rows = [
        {"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(mask == 0, -100)}
        for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True)
    ]
    options = {**given_to("fine-tuning", tmp_path)["options"], "max_steps": 1}
    arguments = transformers.TrainingArguments(**options)
    given["trainer"] = transformers.Trainer(given["model"], arguments, train_dataset=rows)
    exec(compile(callback, "padded-batches.md", "exec"), given)
    assert capsys.readouterr().out.endswith("61.8% saved\n")


def test_quickstart_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    given: dict[str, Any] = {}
    for code in blocks("quickstart"):
        exec(compile(code, "quickstart.md", "exec"), given)
    assert given["loss"].item() < 3  # untrained: log(64), which is 4.2
    assert "steps of 1 rank with 256 tokens each" in capsys.readouterr().out


def _padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch, as collators of other libraries make it."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, -100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}


@pytest.mark.slow
def test_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    """With a saved model, a small dataset, a CPU and a mesh of one rank in the places that it leaves open."""
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    given = given_to("fine-tuning", tmp_path)
    given.pop("model").save_pretrained(tmp_path / "model")
    given["folder"] = tmp_path / "model"
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    places = {"from_pretrained(...)": "from_pretrained(folder)", "32768": "64", 'device="cuda"': 'device="cpu"'}
    for place, filled in places.items():
        assert place in text
        text = text.replace(place, filled)
    model, padded, loading, shared, alone = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    exec(model, given)
    arguments = transformers.TrainingArguments(**given["options"], per_device_train_batch_size=4)
    given["trainer"] = transformers.Trainer(given["model"], arguments, _padded, given["dataset"])
    exec(padded, given)
    assert 0 < given["handle"].saved.tokens_computed < given["handle"].saved.tokens_given
    given["handle"].unpatch()

    given["trainer"] = transformers.Trainer(given["model"], arguments, None, given["dataset"])
    exec(loading, given)
    given["batch"] = next(iter(given["loader"]))
    given["trainer"].train()
    given["handle"].undo()

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        given["mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "sp"))
        given["model"].zero_grad()
        exec(shared, given)
    finally:
        torch.distributed.destroy_process_group()
    assert all(p.grad is not None for p in given["model"].parameters())

    given |= {name: torch.randn(2330, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    exec(alone, given)
    assert given["out"].shape == (2330, 4, 16)
