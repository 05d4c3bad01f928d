"""How keys and values travel between ranks: one file per exchange. `call.py` holds what they share."""
