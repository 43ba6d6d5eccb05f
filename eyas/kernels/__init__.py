"""Operators that decoding stands on: packed products, attention over a cache, fused layers; exact for any batch."""
