"""Train with transformers.Trainer on packed rows: one line sets the trainer up.

python examples/train_with_trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tritonpack

VOCABULARY = 64


def counting_documents(count: int) -> list[dict[str, list[int]]]:
    """Documents of 5 to 60 tokens that count upwards from a random number."""
    lengths = torch.randint(5, 61, (count,)).tolist()
    starts = torch.randint(VOCABULARY, (count,)).tolist()
    spans = zip(starts, lengths, strict=True)
    return [{"input_ids": [(start + i) % VOCABULARY for i in range(length)]} for start, length in spans]


def main(steps: int = 15) -> list[float]:
    """Train, and return the logged losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        )
        documents = counting_documents(16 * steps)
        trainer = Trainer(model, arguments, train_dataset=documents)
        print(tritonpack.setup(trainer, tokens=256))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
