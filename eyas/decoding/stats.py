"""What decoding counts. Definitions as in the EAGLE papers; depths are counted from 1.

tau: tokens emitted by rounds / rounds, the bonus token included; the token that the prefill yields and anything after EOS
are not counted, so plain decoding is exactly 1. n-alpha: how often the draft at depth n is accepted, given that one was
offered there, that is, given that depths below n were accepted; joint: how often depths 1..n all were, over all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

DEFINITIONS = {
    "tau": "tokens emitted by rounds / rounds, bonus token included, prefill's token and all after EOS excluded",
    "n-alpha": "share of drafts at depth n that are accepted, given that depths below n were (depths from 1)",
    "near-ties": "choices whose two best scores lie within rounding of each other: only there can texts come to differ",
    "joint": "share of rounds in which depths 1..n were all accepted",
}


@dataclass
class Stats:
    """Counts of one request or of many (`a + b`); times in seconds."""

    requests: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    target_forwards: int = 0  # forwards this request took part in, its prefill included
    near_ties: int = 0  # choices of the target; not counted where decoding is bit-equal by construction
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    by_depth_offered: list[int] = field(default_factory=list)
    by_depth_accepted: list[int] = field(default_factory=list)

    def count_round(self, *, emitted: int, accepted: int, drafted: int, offered: int) -> None:
        """Add a round that emitted `emitted` tokens, `accepted` of them drafted, out of `drafted` nodes.

        `offered` is to how many depths in a row a draft was on offer. The caller cuts all at the end of the text.
        """
        self.rounds += 1
        self.emitted += emitted
        self.drafted += drafted
        self.accepted += accepted
        self.target_forwards += 1
        while len(self.by_depth_offered) < offered:
            self.by_depth_offered.append(0)
            self.by_depth_accepted.append(0)
        for depth in range(offered):
            self.by_depth_offered[depth] += 1
            self.by_depth_accepted[depth] += depth < accepted

    def __add__(self, other: Stats) -> Stats:
        total = Stats()
        for f in fields(Stats):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, list):
                short, long = sorted((mine, theirs), key=len)
                setattr(total, f.name, [a + b for a, b in zip(short, long, strict=False)] + long[len(short) :])
            else:
                setattr(total, f.name, mine + theirs)
        return total

    @property
    def tau(self) -> float:
        return self.emitted / self.rounds if self.rounds else 1.0

    @property
    def n_alpha(self) -> list[float]:
        return [a / o if o else 0.0 for a, o in zip(self.by_depth_accepted, self.by_depth_offered, strict=True)]

    @property
    def joint(self) -> list[float]:
        return [a / self.rounds for a in self.by_depth_accepted] if self.rounds else []

    @property
    def seconds(self) -> float:
        """Time of decoding, prefill apart."""
        return self.draft_s + self.verify_s + self.other_s
