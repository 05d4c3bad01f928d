"""Train a small model on a text file, once as transformers does and once packed, and compare losses and times.

python examples/quickstart.py notes.txt  # without a name it takes its own source

A document is a paragraph, and a token is a byte. Both models take the same documents in each step, so their losses are
the same up to rounding. The first one gets a padded batch, the second one a row without padding.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import tritonpack

DOCUMENTS, LONGEST = 16, 512  # of a step; bytes of one
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def read_documents(path: str) -> list[dict[str, list[int]]]:
    """The paragraphs of a text file; long ones are cut."""
    paragraphs = [paragraph.strip().encode() for paragraph in Path(path).read_text("utf-8", "replace").split("\n\n")]
    pieces = [text[i : i + LONGEST] for text in paragraphs for i in range(0, len(text), LONGEST)]
    return [{"input_ids": list(piece)} for piece in pieces if len(piece) > 1]


def pad(documents: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch, as stock training takes it."""
    ids = [torch.tensor(document["input_ids"]) for document in documents]
    mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask, "labels": labels}


def train(
    name: str, documents: list[dict[str, list[int]]], collate: Any, steps: int, *, patch: bool
) -> tuple[float, float]:
    """The mean loss of the last 10 steps, and the seconds of all steps but the first, which may compile kernels."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).to(DEVICE)
    if patch:
        tritonpack.patch(model)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(documents, DOCUMENTS, shuffle=True, collate_fn=collate, generator=torch.Generator())
    batches = (batch for _ in iter(int, 1) for batch in loader)  # one epoch after the other
    losses = []
    start = time.perf_counter()
    for step, batch in zip(bar := tqdm(range(steps), name), batches, strict=False):
        batch = {key: value.to(DEVICE) if torch.is_tensor(value) else value for key, value in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if step == 0:
            start = time.perf_counter()
    return sum(losses[-10:]) / len(losses[-10:]), time.perf_counter() - start


def main(path: str = __file__, steps: int = 40) -> dict[str, tuple[float, float]]:
    """Train both, print what they reached, and return it."""
    try:
        documents = read_documents(path)
    except OSError as error:
        sys.exit(f"{path} can't be read: {error}")
    if not documents:
        sys.exit(f"{path} holds no text; pass a file with paragraphs that empty lines separate.")
    lengths = [len(document["input_ids"]) for document in documents]
    print(f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in all, on {DEVICE}")
    stock = train("stock, padded", documents, pad, steps, patch=False)
    packed = train("tritonpack", documents, tritonpack.PackingCollator(), steps, patch=True)
    reached = {"stock, padded": stock, "tritonpack": packed}
    for name, (loss, seconds) in reached.items():
        print(f"{name:14} loss {loss:.4f}  {seconds:5.1f} s")
    if len(documents) < DOCUMENTS:
        print(f"The text is too short to compare times; take one of at least {DOCUMENTS} paragraphs.")
    else:
        print(f"stock took {stock[1] / packed[1]:.1f} times as long")
    return reached


if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    main(*sys.argv[1:2])
