"""Drafters propose; they know nothing of sampling. Each returns logits over its own vocabulary and decoding ranks them.

One kind a file; `opening` makes one of what a command line calls it.
"""

from eyas.decoding.drafters.drafter import Drafter
from eyas.decoding.drafters.eagle import Eagle1Drafter, Eagle3Drafter
from eyas.decoding.drafters.joined import JoinedDrafter
from eyas.decoding.drafters.llm import LLMDrafter
from eyas.decoding.drafters.lookup import LookupDrafter
from eyas.decoding.drafters.medusa import MedusaDrafter

__all__ = [
    "Drafter", "Eagle1Drafter", "Eagle3Drafter", "JoinedDrafter", "LLMDrafter", "LookupDrafter", "MedusaDrafter",
]  # fmt: skip
