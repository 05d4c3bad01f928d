"""Packed rows are turned into batches with one document in each row, and their outputs back into packed rows."""
