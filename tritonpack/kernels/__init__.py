"""The Triton kernels. Nothing here knows of models, documents or packing: only of intervals of keys per query."""
