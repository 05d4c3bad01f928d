"""How keys and values travel between ranks: one file per exchange, and `call.py` with their common parts."""
