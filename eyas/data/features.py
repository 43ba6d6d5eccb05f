"""Features: what a head learns from. For a text of S tokens the n taps of the target at its first S - 1 positions and, at
every position whose next token is supervised, the target's own distribution (the teacher) as its most probable tokens.

They are written by the forward that already happens: while the target answers, or in one reading of a given text.
Taps are kept in 8 bits with a scale per tap and token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.chat import Sample
from eyas.data.hashing import content_id
from eyas.target import Target

TEACHER_TOP_K = 32  # tokens of the teacher's distribution that are kept; the rest of its mass is dropped


@dataclass(frozen=True)
class Features:
    """One text's features on the host. `key` names the text by its content (`text_key`).

    `ids` int64 [S]; `supervised` bool [S]; `taps` int8 [S-1, n, H] with `scales` float32 [S-1, n]: tap = taps * scale;
    `teacher_ids` int32 [P, K] and `teacher_probs` float16 [P, K], most probable first, for the P positions whose next token
    is supervised, in order; probabilities are those of the whole vocabulary.
    """

    key: str
    ids: Tensor
    supervised: Tensor
    taps: Tensor
    scales: Tensor
    teacher_ids: Tensor
    teacher_probs: Tensor

    @classmethod
    def pack(cls, sample: Sample, taps: Tensor, teacher: tuple[Tensor, Tensor]) -> Features:
        """From a text, its float taps [S-1, n, H] and its teacher rows ([P, K], [P, K])."""
        ids = torch.tensor(sample.ids, dtype=torch.long)
        supervised = torch.tensor(sample.mask())
        quantised, scales = quantise(taps.float())
        teacher_ids, teacher_probs = teacher
        assert len(taps) == len(ids) - 1 and len(teacher_ids) == int(supervised[1:].sum())
        return cls(text_key(sample), ids, supervised, quantised, scales, teacher_ids.int(), teacher_probs.half())

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        parts = (self.ids, self.supervised, self.taps, self.scales, self.teacher_ids, self.teacher_probs)
        return sum(part.nbytes for part in parts)

    @property
    def float_taps(self) -> Tensor:
        """float32 [S-1, nH]."""
        return (self.taps.float() * self.scales[..., None]).flatten(1)


def text_key(sample: Sample) -> str:
    """A name for a text's tokens and spans, the same wherever it comes from."""
    return content_id(sample.ids, [list(span) for span in sample.spans])


def quantise(taps: Tensor) -> tuple[Tensor, Tensor]:
    """[..., H] -> int8 [..., H] and float32 scales [...], symmetric, the largest value of a tap at 127."""
    scales = taps.abs().amax(-1).clamp(min=1e-12) / 127  # [...]
    return (taps / scales[..., None]).round().to(torch.int8), scales


def teacher_rows(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable tokens of `logits` [n, V]: ids int64 [n, K], probabilities float32 [n, K], best first."""
    probs, ids = logits.float().topk(min(top_k, logits.shape[-1]), dim=-1)
    return ids, (probs - logits.float().logsumexp(-1, keepdim=True)).exp()


def apart(taps: Tensor, target: Target) -> Tensor:
    """The taps of `target` one by one: [..., nH] -> [..., n, H]."""
    return taps.unflatten(-1, (len(target.tap_ids), -1))


CHUNK = 512  # positions projected to the vocabulary at a time: bounds memory at CHUNK x V floats


@torch.inference_mode()
def read_features(target: Target, sample: Sample, top_k: int = TEACHER_TOP_K) -> Features:
    """The features of a text that was written elsewhere: one forward over it without a cache."""
    ids = torch.tensor(sample.ids, device=target.device)
    out = target.read(ids[None, :-1])
    wanted = out.hidden[0, torch.tensor(sample.mask()[1:], device=target.device)]  # [P, H]
    chunks = [teacher_rows(target.logits(part), top_k) for part in wanted.split(CHUNK)]
    teacher = torch.cat([c[0] for c in chunks]).cpu(), torch.cat([c[1] for c in chunks]).cpu()
    return Features.pack(sample, apart(out.taps[0].cpu(), target), teacher)
