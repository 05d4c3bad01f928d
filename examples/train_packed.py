"""Train in a plain loop on packed documents of any length, without padding; no document sees another.

python examples/train_packed.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tritonpack import PackingCollator, patch

VOCABULARY = 64


def counting_documents(count: int) -> list[dict[str, torch.Tensor]]:
    """Documents of 5 to 60 tokens that count upwards from a random number."""
    lengths = torch.randint(5, 61, (count,)).tolist()
    starts = torch.randint(VOCABULARY, (count,)).tolist()
    spans = zip(starts, lengths, strict=True)
    return [{"input_ids": torch.arange(start, start + length) % VOCABULARY} for start, length in spans]


def main(steps: int = 30) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device)
    patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(counting_documents(8 * steps), batch_size=8, collate_fn=PackingCollator())
    losses = []
    for batch in loader:
        batch = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}: {batch['input_ids'].shape[1]} tokens, loss {loss.item():.3f}")
    return losses


if __name__ == "__main__":
    main()
