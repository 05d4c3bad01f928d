"""Lightning's Trainer with a patched model: packed rows, resume from its checkpoints, two processes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import tritonpack
from tests.ecosystem.training import features
from tests.patches.models import tiny_model
from tritonpack.integrations.lightning import PackedTrainLoader

EPOCHS = 3
DOCUMENTS = features() * 2
SINGLE = 8 * torch.finfo(torch.float32).eps
OPTIONS: dict[str, Any] = {"tokens": 40, "seed": 0, "epochs": EPOCHS}


def loader(**options: Any) -> PackedTrainLoader:
    return PackedTrainLoader(DOCUMENTS, **{**OPTIONS, **options})


def of_loop(**options: Any) -> Any:
    return tritonpack.dataloader(DOCUMENTS, **{**OPTIONS, **options})


def test_passes_are_those_of_a_loop() -> None:
    own, plain = loader(), of_loop()
    assert len(own) == len(plain)
    iter(own)  # Lightning makes one iterator that it doesn't use
    for _ in range(EPOCHS):
        for row, want in zip(own, plain, strict=True):
            assert torch.equal(row["input_ids"], want["input_ids"])


@pytest.mark.parametrize("done", [0, 3, 9])
def test_a_state_is_resumed_where_it_was_saved(done: int) -> None:
    """At the end of an epoch Lightning begins the next one, so no pass is empty."""
    first = loader()
    rows = iter(first)
    for _ in range(done):
        next(rows)
    again = loader()
    again.load_state_dict(first.state_dict())
    rest = [*rows] or [*first]
    assert [row["input_ids"].tolist() for row in again] == [row["input_ids"].tolist() for row in rest]


def test_epochs_of_unequal_length_are_refused() -> None:
    short = loader(epochs=1)
    steps = len(short)
    assert len([*short]) == steps
    with pytest.raises(ValueError, match=rf"epoch 1 has {steps - 1} steps.*Pass epochs=trainer\.max_epochs"):
        list(short)


def test_rows_of_one_rank_are_refused_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    early = loader()
    len(early)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="rank 0 of 1, and this process is rank 1 of 2"):
        next(iter(early))
    assert len([*loader(num_replicas=2, rank=1)]) == len(of_loop(num_replicas=2, rank=1))


def module_of(base: Any) -> Any:
    class Module(base):
        """The recipe of docs/ecosystem.md, and a record of the rows that it has seen."""

        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model("mistral")
            tritonpack.patch(self.model)
            self.seen: list[tuple[int, list[int]]] = []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            self.seen.append((self.current_epoch, batch["input_ids"][0].tolist()))
            targets = (batch["labels"][:, 1:] != -100).sum()
            if self.trainer.world_size > 1:
                torch.distributed.all_reduce(targets)
            return self.model(**batch, num_items_in_batch=targets / self.trainer.world_size).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(module: Any, rows: Any, folder: Path, ckpt_path: Path | None = None, **options: Any) -> None:
    from lightning.pytorch import Trainer

    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **options}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(default_root_dir=folder, **quiet, **options).fit(module, rows, ckpt_path=ckpt_path)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


def trained_by_a_loop(ranks: int) -> Tensor:
    """Plain gradient descent on the rows of all ranks, with each document in a row of its own and no patch."""
    model = tiny_model("mistral")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loaders = [of_loop(num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for _ in range(EPOCHS):
        for rows in zip(*loaders, strict=True):
            documents: list[Tensor] = []
            for row in rows:
                starts = (row["position_ids"][0] == 0).nonzero().flatten().tolist()
                documents += torch.tensor_split(row["input_ids"], starts[1:], dim=1)
            count = sum(document.shape[1] - 1 for document in documents)
            optimizer.zero_grad()
            for ids in documents:
                if ids.shape[1] > 1:
                    model(input_ids=ids, labels=ids, num_items_in_batch=count).loss.backward()
            optimizer.step()
    return weights(model)


@pytest.fixture
def lightning() -> Any:
    return pytest.importorskip("lightning.pytorch")


@pytest.mark.slow
def test_trains_as_a_plain_loop_on_documents_alone(lightning: Any, tmp_path: Path) -> None:
    module = module_of(lightning.LightningModule)
    fit(module, loader(), tmp_path, enable_checkpointing=False)
    assert [epoch for epoch, _ in module.seen] == [epoch for epoch in range(EPOCHS) for _ in range(len(of_loop()))]
    assert float((weights(module) - trained_by_a_loop(1)).abs().max()) < SINGLE


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("make", [loader, of_loop], ids=["PackedTrainLoader", "dataloader"])
def test_resumes_from_its_checkpoints(lightning: Any, tmp_path: Path, options: dict[str, Any], make: Any) -> None:
    """Within an epoch and right after its end; `PackedTrainLoader` at its end, too."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = module_of(lightning.LightningModule)
    fit(whole, make(**options), tmp_path, callbacks=[keep])
    steps = len(make())
    for done in (4, steps + 1, *([steps, 2 * steps] if make is loader else [])):
        module = module_of(lightning.LightningModule)
        path = tmp_path / f"step={done}.ckpt"
        fit(module, make(**options), tmp_path, path, enable_checkpointing=False)
        assert module.seen == whole.seen[done:]
        assert torch.equal(weights(module), weights(whole))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["packed", "collator", "loader"])
def test_two_processes(lightning: Any, tmp_path: Path, case: str) -> None:
    """torch's own loaders with our samplers are refused by Lightning, which says so; nothing is replaced silently."""
    file = str(Path(__file__).resolve())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", file]
    done = subprocess.run([*command, case, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    if case == "loader":
        assert done.returncode != 0
        assert "there is no process group to ask" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    if case == "packed":
        assert float((results[0]["weights"] - trained_by_a_loop(2)).abs().max()) < SINGLE
    else:  # each document once
        rows = [token for result in results for _, row in result["seen"] for token in row]
        assert sorted(rows) == sorted(token for document in DOCUMENTS for token in document["input_ids"])


def main(case: str, folder: Path) -> None:
    """One process of `test_two_processes`."""
    from lightning.pytorch import LightningModule

    collate: Any = tritonpack.PackingCollator()
    make: dict[str, Any] = {
        "packed": loader,
        "collator": lambda: DataLoader(DOCUMENTS, batch_size=3, collate_fn=collate),  # type: ignore[arg-type]
        "loader": of_loop,
    }
    module = module_of(LightningModule)
    epochs = EPOCHS if case == "packed" else 1
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp", "enable_checkpointing": False, "max_epochs": epochs}
    fit(module, make[case](), folder, **options)
    rank = module.global_rank
    torch.save({"weights": weights(module), "seen": module.seen}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
