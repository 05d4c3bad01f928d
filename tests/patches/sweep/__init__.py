"""The sweep: every class of transformers that takes text, packed and compared with each document alone."""
