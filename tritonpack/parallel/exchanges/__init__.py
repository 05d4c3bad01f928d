"""How keys and values travel between ranks: one file per exchange.

What they share: `call.py` the arguments of a call, `parts.py` parts of the keys, `merge.py` merging their results,
`trade.py` rows that travel to the ranks that compute their heads.
"""
