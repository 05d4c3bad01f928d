"""Packed rows as batches with one document in each row, and the outputs of such batches in packed rows again."""
