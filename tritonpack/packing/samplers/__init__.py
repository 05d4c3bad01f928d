"""Batch samplers over plans and bins, and their states."""
