"""Layers that get a forward of their own in a patched model: a mask alone does not keep documents apart in them."""
