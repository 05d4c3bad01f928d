"""Bins from streams of documents."""
