"""Exchanges: keys and values travel between ranks.

`by_heads.py` has "all_gather", "group_cast" and "auto", `ring.py` and `ulysses.py` the others. They share `call.py`,
the arguments of a call and the merging of results, and `keys.py`, parts of the keys.
"""
