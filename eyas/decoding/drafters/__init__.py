"""Drafters propose; they know nothing of sampling. Each returns logits over its own vocabulary and decoding ranks them."""

from eyas.decoding.drafters.eagle3 import Drafter, Eagle3Drafter

__all__ = ["Drafter", "Eagle3Drafter"]
