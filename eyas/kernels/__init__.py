"""Operators that decoding stands on: packed products, attention over a cache, norms and gates; exact for any batch."""
