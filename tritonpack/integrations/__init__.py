"""Plugins for training frameworks that have an interface for them, one module or package each."""
