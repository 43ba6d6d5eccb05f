"""The decoding engine: rows are slots of a preallocated cache, requests join and leave between rounds.

A round drafts a tree for every row, verifies all of it in one target forward, walks each tree along the target's own
choices and commits what was walked. Without a drafter the tree is empty and the round is plain decoding: one code path,
the same tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.chat import render
from eyas.data.features import TEACHER_TOP_K, teacher_rows
from eyas.decoding.cache import KVCache
from eyas.decoding.drafters import Drafter, committed_mask
from eyas.decoding.row import Piece, Request, Result, Row
from eyas.decoding.sampling import BatchSampler
from eyas.decoding.stats import Stats
from eyas.decoding.tree import DraftTree, TreeShape, ancestry, grow
from eyas.decoding.verify import Walk, walk
from eyas.errors import EyasError
from eyas.target import Target, TargetOutput

__all__ = ["Engine", "Event", "Piece", "Request", "Result"]


# Up to this many nodes of all rows are projected to the vocabulary together, which reads its weights once; of more, only the
# nodes that the walk visits, which bounds the memory of the logits.
PROJECTED_AT_ONCE = 64


@dataclass(frozen=True)
class Event:
    """What a round did for one request; `result` is there when it is finished."""

    ticket: int
    piece: Piece
    result: Result | None


class Engine:
    """Decodes requests with `target`, drafting with `drafter` (None: plain decoding).

    `tree` is the draft's shape, `max_rows` how many requests decode together, `max_length` the longest text (prompt and
    answer, tokens). The cache for all of it is allocated at once; `cache_bytes` says how much. With `features` every result
    carries the taps and the teacher of its tokens, as training needs them.
    Raises EyasError when the tree does not fit the drafter or the cache does not fit the memory.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, tree: TreeShape | None = None, max_rows: int = 1,
        max_length: int = 2048, features: bool = False,
    ) -> None:  # fmt: skip
        self.target, self.drafter, self.features = target, drafter, features
        self.tree = (tree or TreeShape()) if drafter is not None else TreeShape.chain(0)
        if drafter is not None and self.tree.top_k > len(drafter.target_ids):
            raise EyasError(f"top_k {self.tree.top_k} is more than the drafter's {len(drafter.target_ids)} tokens")
        if max_rows < 1 or max_length < 2:
            raise EyasError(f"an engine needs at least 1 row of 2 tokens, not {max_rows} of {max_length}")
        self.max_rows = max_rows
        self.max_length = min(max_length, target.max_length)
        length = self.max_length + self.tree.total + 1
        self.cache_bytes = KVCache.bytes_needed(target.layer_shapes, max_rows, length, target.dtype)
        try:
            self.cache = KVCache(target.layer_shapes, max_rows, length, dtype=target.dtype, device=target.device)
            if drafter is not None:
                drafter.allocate(max_rows, self.max_length + 1, self.tree.top_k * max(self.tree.depth - 1, 0))
        except RuntimeError as error:
            raise EyasError(
                f"no memory for the KV cache: {max_rows} rows of {self.max_length} tokens need "
                f"{self.cache_bytes / 1e9:.1f} GB; lower the number of rows or the length"
            ) from error
        self.stats = Stats()  # of all finished requests
        self._tickets = count()
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []  # row i lives in slot i of every cache

    # -- the public face --------------------------------------------------------------------------------------------

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt ids of a conversation, rendered by the target's own template up to the answer."""
        return render(self.target.tokenizer, messages)

    def generate(self, requests: Iterable[Request], on_finish: Callable[[Result], None] | None = None) -> list[Result]:
        """Answer all `requests`, `max_rows` at a time; the results are in the requests' order.

        `requests` is read only as rows become free, so an iterator can end a long job early. `on_finish` sees each result
        as it comes. Raises EyasError for a prompt that does not fit.
        """
        source = iter(requests)
        results: dict[int, Result] = {}
        exhausted = False
        try:
            while self.busy or not exhausted:
                while not exhausted and len(self._rows) + len(self._waiting) < self.max_rows:
                    request = next(source, None)
                    if request is None:
                        exhausted = True
                    else:
                        self.submit(request)
                for event in self.step():
                    if event.result is not None:
                        results[event.ticket] = event.result
                        if on_finish is not None:
                            on_finish(event.result)
        except BaseException:  # an interrupt must not leave its requests to the next caller
            self._rows.clear()
            self._waiting.clear()
            raise
        return [results[ticket] for ticket in sorted(results)]

    def stream(self, request: Request) -> Iterator[Piece]:
        """Answer one request, yielding what each round adds. Leaving the loop early cancels it."""
        ticket = self.submit(request, watch=True)
        try:
            while self._known(ticket):
                for event in self.step():
                    if event.ticket == ticket:
                        yield event.piece
        finally:
            self.cancel(ticket)

    def submit(self, request: Request, *, watch: bool = False) -> int:
        """Queue a request and return its ticket; only a watched one has text in its pieces while it runs.

        Raises EyasError for an empty prompt or one that does not fit.
        """
        room = self.max_length - len(request.ids)
        name = f" '{request.id}'" if request.id else ""
        if not request.ids:
            raise EyasError(f"the prompt{name} is empty")
        if room < 1:
            raise EyasError(
                f"the prompt{name} has {len(request.ids)} tokens, the engine holds texts of {self.max_length} with the "
                f"answer (the target's limit is {self.target.max_length}); shorten it or raise the maximum length"
            )
        limit = min(request.params.max_new_tokens, room)
        ticket = next(self._tickets)
        self._waiting.append(Row(ticket, request, self.target.tokenizer, self.target.eos_ids, limit, watch))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Forget a request, waiting or running, and free its slot; unknown tickets are ignored."""
        self._waiting = deque(row for row in self._waiting if row.ticket != ticket)
        for slot, row in enumerate(self._rows):
            if row.ticket == ticket:
                self._leave(slot)

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Admit what fits, run one round for all rows, and say what it added to each."""
        events = []
        while self._waiting and len(self._rows) < self.max_rows:
            events.append(self._admit(self._waiting.popleft()))
        if self._rows:
            events += self._round()
        return events

    # -- a request's way --------------------------------------------------------------------------------------------

    def _known(self, ticket: int) -> bool:
        return any(row.ticket == ticket for row in (*self._rows, *self._waiting))

    def _admit(self, row: Row) -> Event:
        """Prefill a request in the next free slot; its first token is the prefill's own.

        What another row's prompt begins with as well is copied from there (the system prompt, say), for the drafter too.
        """
        start = time.perf_counter()
        slot = len(self._rows)
        donor, shared = self._donor(row.request.ids)
        self._rows.append(row)
        self.cache.share(donor, slot, shared)
        prompt = torch.tensor(row.request.ids, device=self.target.device)  # [L]
        length = len(prompt)
        slots = torch.arange(shared, length, device=prompt.device)[None]  # [1, L - shared]
        keys = torch.arange(length, device=prompt.device)  # [L]
        mask = (keys <= slots[0, :, None])[None, None]  # [1, 1, L - shared, L]
        out = self.target.forward(prompt[None, shared:], slots, self.cache.view(slot, 1, slots), mask, keys[None])
        self.cache.lengths[slot] = length
        logits = self.target.logits(out.hidden[:, -1])  # [1, V]
        if self.features:
            before = self._rows[donor].taps[0][:shared] if shared else out.taps[0, :0].cpu()
            row.taps.append(torch.cat([before, out.taps[0].cpu()]))
            row.teacher.append(teacher_rows(logits.cpu(), TEACHER_TOP_K))
        token = BatchSampler([row.request.params], prompt.device).choose(logits, [0])  # [1]
        if self.drafter is not None:
            self.drafter.share(donor, slot, shared)
            self.drafter.prefill(slot, prompt[shared + 1 :], out.taps[0, :-1])
            row.unread_tokens.append(token)
            row.unread_taps.append(out.taps[0, -1:])
        row.take([int(token)], 0)
        row.stats.target_forwards += 1
        row.stats.prefill_s += time.perf_counter() - start
        return self._event(slot, 1)

    def _donor(self, prompt: list[int]) -> tuple[int, int]:
        """The active row whose prompt has the longest beginning in common with `prompt`, and how many positions of it
        can be taken over: one fewer than the common tokens, since the drafter pairs a position with the token after it."""
        best = (0, 0)
        for slot, row in enumerate(self._rows):
            pairs = zip(prompt, row.request.ids, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(row.request.ids)))
            best = max(best, (slot, max(common - 1, 0)), key=lambda pair: pair[1])
        return best

    def _round(self) -> list[Event]:
        """Draft, verify, walk, commit, for every active row."""
        rows = self._rows
        sampler = BatchSampler([row.request.params for row in rows], self.target.device)
        start = time.perf_counter()
        tree = self._draft(sampler)
        drafted = time.perf_counter()
        out = self._verify(tree)
        few = out.hidden.shape[0] * out.hidden.shape[1] <= PROJECTED_AT_ONCE
        logits = self.target.logits(out.hidden) if few else None  # [B, N+1, V]
        verified = time.perf_counter()
        result, teacher = self._walk(tree, out, logits, sampler)
        kept = self._commit(result, out, tree.tokens.shape[1], teacher)
        ended = time.perf_counter()
        for row in rows:
            row.stats.draft_s += (drafted - start) / len(rows)
            row.stats.verify_s += (verified - drafted) / len(rows)
            row.stats.other_s += (ended - verified) / len(rows)
        return [self._event(slot, kept[slot]) for slot in reversed(range(len(rows)))][::-1]

    def _draft(self, sampler: BatchSampler) -> DraftTree:
        """Let the drafter read what was committed since it last did, then grow every row's tree."""
        rows, drafter = self._rows, self.drafter
        if drafter is None or self.tree.total == 0:
            return DraftTree.empty(len(rows), self.target.device)
        tokens = [torch.cat(row.unread_tokens) for row in rows]
        taps = [torch.cat(row.unread_taps) for row in rows]
        counts = torch.tensor([len(t) for t in tokens])
        for row in rows:
            row.unread_tokens, row.unread_taps = [], []
        logits = drafter.extend(pad_sequence(tokens, True), pad_sequence(taps, True), counts)  # [B, D]

        def rank(level: Tensor, depth: int) -> Tensor:
            return sampler.rank_drafts(level, [len(row.ids) + depth - 1 for row in rows], drafter.target_ids)

        return grow(logits, drafter.expand, rank, drafter.target_ids, self.tree)

    def _verify(self, tree: DraftTree) -> TargetOutput:
        """One target forward over every row's last token and its tree."""
        rows, nodes = len(self._rows), tree.tokens.shape[1] + 1
        device = self.target.device
        lengths = self.cache.lengths[:rows].to(device)  # [B]
        last = torch.tensor([[row.ids[-1]] for row in self._rows], device=device)  # [B, 1]
        depths = torch.cat([torch.zeros_like(last), tree.depths], 1)  # [B, N+1]
        positions = lengths[:, None] + depths
        slots = lengths[:, None] + torch.arange(nodes, device=device)  # [B, N+1]
        view = self.cache.view(0, rows, slots)
        mask = committed_mask(lengths, nodes, view.end)  # [B, N+1, K]
        mask.scatter_(2, slots[:, None].expand(rows, nodes, nodes), ancestry(tree.parents))
        key_positions = torch.arange(view.end, device=device).repeat(rows, 1).scatter(1, slots, positions)  # [B, K]
        return self.target.forward(torch.cat([last, tree.tokens], 1), positions, view, mask[:, None], key_positions)

    def _walk(
        self, tree: DraftTree, out: TargetOutput, projected: Tensor | None, sampler: BatchSampler
    ) -> tuple[Walk, list[tuple[Tensor, Tensor]]]:
        """Walk the trees. Where the nodes were too many to project at once, those visited are projected now."""
        every = torch.arange(len(self._rows), device=self.target.device)
        teacher = []

        def choose(nodes: Tensor, step: int) -> Tensor:
            logits = self.target.logits(out.hidden[every, nodes]) if projected is None else projected[every, nodes]  # [B, V]
            if self.features:
                teacher.append(teacher_rows(logits.cpu(), TEACHER_TOP_K))
            return sampler.choose(logits, [len(row.ids) + step for row in self._rows])

        return walk(tree, self.tree.depth, choose), teacher

    def _commit(self, walked: Walk, out: TargetOutput, drafted: int, teacher: list[tuple[Tensor, Tensor]]) -> list[int]:
        """Append each row's walked tokens up to its end, and keep their keys, values and taps; return how many."""
        kept = []
        counts, offered, tokens = walked.counts.tolist(), walked.offered.tolist(), walked.tokens.tolist()
        nodes = walked.nodes.cpu()  # [B, A]
        for slot, row in enumerate(self._rows):
            taken = row.take(tokens[slot][: counts[slot]], counts[slot] - 1)
            row.stats.count_round(
                emitted=taken, accepted=min(counts[slot] - 1, taken), drafted=drafted, offered=min(offered[slot], taken)
            )
            kept.append(taken)
            path = nodes[slot, :taken]  # the nodes at which the taken tokens were chosen
            self.cache.commit(slot, path)
            taps = out.taps[slot, path.to(out.taps.device)]  # [taken, 3H]
            if self.drafter is not None:
                row.unread_tokens.append(walked.tokens[slot, :taken])
                row.unread_taps.append(taps)
            if self.features:
                row.taps.append(taps.cpu())
                row.teacher += [(ids[slot : slot + 1], probs[slot : slot + 1]) for ids, probs in teacher[:taken]]
        return kept

    def _event(self, slot: int, added: int) -> Event:
        """Tell of the last `added` tokens of a row, and let it leave if it is finished."""
        row = self._rows[slot]
        piece = Piece(row.ids[-added:], row.accepted[-added:], row.fresh_text() if row.watched else "")
        if row.finish is None:
            return Event(row.ticket, piece, None)
        self.stats = self.stats + row.stats
        self._leave(slot)
        return Event(row.ticket, piece, row.result())

    def _leave(self, slot: int) -> None:
        """Free a slot; the last row moves into it, so that the active rows stay together."""
        last = len(self._rows) - 1
        if slot != last:
            self.cache.move(last, slot)
            if self.drafter is not None:
                self.drafter.move(last, slot)
            self._rows[slot] = self._rows[last]
        self._rows.pop()
