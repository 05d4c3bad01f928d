"""The mask: which keys each query sees, how this is computed, and its forms for other attention functions."""
