"""Which keys each query sees: the mask, how it is built, and its forms for other attention functions."""
