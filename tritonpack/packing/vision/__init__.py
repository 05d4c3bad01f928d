"""Packing of documents with images and videos: a processor's outputs, example by example, to one row."""
