"""Sequences that begin alike: which of them share a row, and batches of trees."""
