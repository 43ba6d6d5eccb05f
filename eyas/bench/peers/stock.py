"""transformers' own `generate` on the target's stock weights, loaded anew: a Target has replaced the attention and may have
packed the weights of its model, which would not be the decoder that others run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from eyas.bench.peers.peer import counted, require_understood, result_of
from eyas.bench.peers.watch import Forward, watched
from eyas.decoding.engine import Request, Result
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.loading import load_model
from eyas.locate import locate
from eyas.machine import clock
from eyas.target import Target


def load_stock(name: str, dtype: torch.dtype, device: str) -> Any:
    """The model `name` as transformers loads it, without defaults of its own for sampling.

    Raises EyasError when it cannot be loaded.
    """
    model, _ = load_model(locate(name), dtype=dtype, device_map=device, name=name)
    model.generation_config = GenerationConfig()
    return model.eval()


def version() -> str:
    return f"transformers {transformers.__version__}"


stock_model = lru_cache(maxsize=1)(load_stock)  # all peers of a race decode with one copy


@dataclass
class StockPeer:
    """`generate` in an engine's place: up to `rows` requests together, padded on the left.

    `drafting` are the keyword arguments that make it draft, for which transformers takes one request at a time; `assistant` is
    the model that it drafts with, where it is one.
    """

    name: str
    target: Target
    rows: int
    max_length: int
    how: str
    drafting: dict[str, Any] = field(default_factory=dict)
    assistant: Any = None

    def __post_init__(self) -> None:
        self.model = stock_model(self.target.name, self.target.dtype, self.target.device.type)

    @property
    def policy(self) -> str:
        dtype = str(self.target.dtype).removeprefix("torch.")
        return f"{self.how}, stock {dtype} weights, {self.model.config._attn_implementation} attention"

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Answer `requests`; those with the same sampling go together. The seed is the first one's, by torch's generator."""
        answer = self._alone if self.drafting else self._together
        return [result for group in self._groups(list(requests)) for result in answer(group)]

    def _groups(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        for _, alike in groupby(requests, key=lambda r: replace(r.params, seed=0, sample=0, max_new_tokens=1)):
            group = list(alike)
            size = 1 if self.drafting else self.rows
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _together(self, group: Sequence[Request]) -> list[Result]:
        out, seen, begun = self._run(group)
        eos = self._eos(group[0].params)
        prefill, rest = seen[0].ended - begun, sum(f.seconds for f in seen[1:])
        results = []
        for request, ids in zip(group, out, strict=True):
            result = result_of(request, self.target, ids, [1] * len(ids), Stats(), eos)
            stats = Stats(prefill_s=prefill / len(group), verify_s=rest / len(group))
            result.stats = counted(stats, [1] * len(result.ids), [0] * len(result.ids))
            results.append(result)
        return results

    def _alone(self, group: Sequence[Request]) -> list[Result]:
        """One request with drafts. The first forward reads the prompt and verifies the first drafts together: its seconds are
        shared by tokens, the prompt's are prefill's, and the drafts' are decoding's, as are the tokens that they brought.
        The assistant's first forward reads the prompt, so it is prefill's."""
        (request,) = group
        with watched(self.assistant or torch.nn.Identity()) as drafts:
            (ids,), seen, begun = self._run(group)
        prompt = len(request.ids)
        read = [prompt, *(forward.known + 1 for forward in seen[1:]), prompt + len(ids)]  # tokens known before each forward
        rounds = [after - before for before, after in pairwise(read)]
        drafted = [seen[0].tokens - prompt, *(forward.tokens - 1 for forward in seen[1:])]
        first = seen[0]
        verifying = first.seconds * drafted[0] / first.tokens
        drafting = sum(f.seconds for f in drafts[1:] if f.begun < first.begun)
        stats = Stats(
            prefill_s=first.ended - begun - verifying - drafting,
            verify_s=verifying + sum(f.seconds for f in seen[1:]),
            draft_s=sum(f.seconds for f in drafts[1:]),
        )
        return [result_of(request, self.target, ids, rounds, counted(stats, rounds, drafted), self._eos(request.params))]

    @torch.inference_mode()
    def _run(self, group: Sequence[Request]) -> tuple[list[list[int]], list[Forward], float]:
        """The tokens written for each of `group`, the target's forwards, and when it was begun."""
        params = group[0].params
        require_understood(self.name, params)
        longest = max(len(r.ids) for r in group)
        pad = min(self.target.eos_ids)
        device = self.model.device
        ids = torch.tensor([[pad] * (longest - len(r.ids)) + r.ids for r in group], device=device)  # [B, L]
        mask = torch.tensor([[0] * (longest - len(r.ids)) + [1] * len(r.ids) for r in group], device=device)  # [B, L]
        told = self._told(params, max(r.params.max_new_tokens for r in group), pad)
        with watched(self.model) as seen, torch.random.fork_rng(devices=[]):
            torch.manual_seed(params.seed)
            begun = clock(device)
            out = self.model.generate(ids, attention_mask=mask, **told, **self.drafting)  # [B, L + new]
        return out[:, longest:].tolist(), seen, begun

    def _told(self, params: SamplingParams, new: int, pad: int) -> dict[str, Any]:
        """What `generate` is told of the sampling: all of it, so that no default is left to it."""
        told: dict[str, Any] = {
            "max_new_tokens": new, "do_sample": params.temperature > 0, "pad_token_id": pad,
            "eos_token_id": sorted(self._eos(params)) or None,
        }  # fmt: skip
        if params.temperature > 0:
            told |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
            told |= {"min_p": params.min_p} if params.min_p else {}
        return told

    def _eos(self, params: SamplingParams) -> frozenset[int]:
        return frozenset() if params.ignore_eos else self.target.eos_ids
