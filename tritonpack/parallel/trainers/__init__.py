"""transformers' Trainer, and TRL's trainers, inside of SequenceParallel."""
