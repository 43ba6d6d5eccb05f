"""The decoding engine: rows are slots of a preallocated cache, requests join and leave between rounds.

A round drafts a tree for every row, verifies all of it in one target forward, walks each tree along the target's own
choices and commits what was walked. Without a drafter the tree is empty and the round is plain decoding: one code path,
the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.chat import render
from eyas.data.features import TEACHER_TOP_K, apart, teacher_rows
from eyas.decoding.cache import KVCache
from eyas.decoding.costs import Bench, Costs, measured
from eyas.decoding.drafters import Drafter
from eyas.decoding.exact import near_ties, require_exact
from eyas.decoding.planner import Planner
from eyas.decoding.policy import Fixed, Policy, Round
from eyas.decoding.rejection import RejectionSampler
from eyas.decoding.row import Piece, Request, Result, Row, TokenLogprob
from eyas.decoding.sampling import BatchSampler
from eyas.decoding.static_tree import StaticTree
from eyas.decoding.stats import Stats
from eyas.decoding.tree import Drafting, DraftTree, TreeShape
from eyas.decoding.verify import Walk, projected, read_trees, walk
from eyas.errors import EyasError
from eyas.machine import clock
from eyas.target import Target, TargetOutput

__all__ = ["Engine", "Event", "Piece", "Request", "Result"]

UNREAD_BYTES = 256 * 2**20  # taps kept for a drafter that is not asked; beyond, it reads on
READ_ALONE = 16  # a row with more unread tokens reads them before the others' round


@dataclass(frozen=True)
class Event:
    """What a round did for one request; `result` is there when it is finished."""

    ticket: int
    piece: Piece
    result: Result | None


class Engine:
    """Decodes requests with `target`, drafting with `drafter` (None: plain decoding).

    `tree` is the draft's shape; None leaves it to the planner, which drafts as much as pays here, down to nothing, by
    `costs` (else it first measures what forwards cost on this machine: seconds, once). `sampling` is the rule: "coupled"
    gives the same text with any drafter, tree and batch, "rejection" only the same distribution. `max_rows` is how many
    requests decode together, `max_length` the longest text (prompt and answer, tokens). The caches for all of it are
    allocated at once; `cache_bytes` says how much. With `features` every result carries the taps and the teacher of its
    tokens, as training needs them. With `exact` a target is refused whose tokens are not bit-equal by construction.
    Raises EyasError when the tree does not fit the drafter or the cache does not fit the memory.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, tree: TreeShape | StaticTree | None = None,
        sampling: str = "coupled", max_rows: int = 1, max_length: int = 2048,
        features: bool = False, costs: Costs | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        if exact:
            require_exact(target, sampling)
        self.target, self.drafter, self.features, self.sampling = target, drafter, features, sampling
        if sampling not in ("coupled", "rejection"):
            raise EyasError(f"unknown sampling rule '{sampling}'; choose coupled or rejection")
        if max_rows < 1 or max_length < 2:
            raise EyasError(f"an engine needs at least 1 row of 2 tokens, not {max_rows} of {max_length}")
        if drafter is None:
            tree = TreeShape.chain(0)
        shape = tree or Planner.largest(len(drafter.target_ids) if drafter else 1, drafter.depth if drafter else 0)
        if drafter is not None and shape.top_k > len(drafter.target_ids):
            raise EyasError(f"top_k {shape.top_k} is more than the drafter's {len(drafter.target_ids)} tokens")
        if drafter is not None and drafter.depth is not None and shape.depth > drafter.depth:
            raise EyasError(
                f"a tree {shape.depth} deep is more than the {drafter.depth} levels that this drafter has; give a shallower one"
            )
        self.max_rows = max_rows
        self.max_length = min(max_length, target.max_length)
        length = self.max_length + shape.total + 1
        self.cache_bytes = KVCache.bytes_needed(target.layer_shapes, max_rows, length, target.dtype)
        try:
            self.cache = KVCache(target.layer_shapes, max_rows, length, dtype=target.dtype, device=target.device)
            if drafter is not None:
                self.cache_bytes += drafter.allocate(max_rows, self.max_length + 1, shape.scratch)
        except RuntimeError as error:
            raise EyasError(
                f"no memory for the KV cache: {max_rows} rows of {self.max_length} tokens need "
                f"{self.cache_bytes / 1e9:.1f} GB; lower the number of rows or the length"
            ) from error
        self._counts_near_ties = sampling == "coupled" and target.inexact is not None
        self.policy: Policy
        if tree is None and drafter is not None:
            assert isinstance(shape, TreeShape)
            self.policy = Planner(costs or measured(Bench(target, self.cache, drafter), shape.top_k), shape)
        else:
            self.policy = Fixed(shape)
        self.stats = Stats()  # of all finished requests
        self._tickets = count()
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []  # row i lives in slot i of every cache
        self._sampler: BatchSampler | None = None  # for these rows; None when they have changed

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
        target, params = self.target, request.params
        processors = params.processors(request.ids, target.tokenizer, target.eos_ids, target.vocab_size)
        limit = min(params.max_new_tokens, room)
        ticket = next(self._tickets)
        self._waiting.append(Row(ticket, request, target.tokenizer, target.eos_ids, limit, processors, watch))
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
        start = clock(self.target.device)
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
            read = apart(out.taps[0].cpu(), self.target)  # [L - shared, n, H]
            row.taps.append(torch.cat([self._rows[donor].taps[0][:shared], read]) if shared else read)
            row.teacher.append(teacher_rows(logits.cpu(), TEACHER_TOP_K))
        self._sampler = None
        sampler = BatchSampler([row.request.params], prompt.device, [row.processors])
        token = sampler.choose(logits, [0])  # [1]
        self._chosen(sampler, [row], logits, token, torch.ones(1, dtype=torch.bool))
        if self.drafter is not None:
            self._inherit(slot, donor, shared)
            row.unread.add(torch.cat([prompt[shared + 1 :], token]), out.taps[0])
        row.take([int(token)], 0)
        row.stats.target_forwards += 1
        row.stats.prefill_s += clock(self.target.device) - start
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

    def _inherit(self, slot: int, donor: int, shared: int) -> None:
        """Let the drafter's row begin with the first `shared` positions of the donor's, as far as that one has read them."""
        assert self.drafter is not None
        unread = self._rows[donor].unread
        behind = max(shared - (int(self.cache.lengths[donor]) - len(unread)), 0)  # of these, not yet read
        self.drafter.begin(slot, self._rows[slot].request.ids[0], donor, shared - behind)
        if behind:
            self._rows[slot].unread.add(*unread.first(behind))

    def _catch_up(self, slot: int) -> None:
        """Let the drafter read all but the last of a row's unread tokens; the first time, that is its prefill."""
        row, start = self._rows[slot], clock(self.target.device)
        if self.drafter is not None and len(row.unread) > 1:
            self.drafter.prefill(slot, *row.unread.take(keep=1))
        seconds = clock(self.target.device) - start
        if row.read:
            row.stats.draft_s += seconds
        else:
            row.stats.prefill_s += seconds
        row.read = True

    # -- a round --------------------------------------------------------------------------------------------------------

    def _round(self) -> list[Event]:
        """Draft, verify, walk, commit, for every active row."""
        rows = self._rows
        if self._sampler is None:
            self._sampler = self._new_sampler()
        sampler = self._sampler
        drafts = self.policy.drafts(rows)
        self._keep_up(drafts)
        start = clock(self.target.device)
        tree = self._draft(sampler) if drafts else DraftTree.empty(len(rows), self.target.device)
        drafted = clock(self.target.device)
        last = torch.tensor([[row.ids[-1]] for row in rows], device=self.target.device)  # [B, 1]
        out = read_trees(self.target, self.cache, last, tree)
        logits = projected(self.target, out)  # [B, N+1, V]
        verified = clock(self.target.device)
        walked, teacher = self._walk(tree, out, logits, sampler)
        kept = self._commit(walked, out, tree, teacher)
        self.policy.learn(rows, Round(tree, walked, verified - drafted))
        ended = clock(self.target.device)
        for row in rows:
            row.stats.draft_s += (drafted - start) / len(rows)
            row.stats.verify_s += (verified - drafted) / len(rows)
            row.stats.other_s += (ended - verified) / len(rows)
        return [self._event(slot, kept[slot]) for slot in reversed(range(len(rows)))][::-1]

    def _new_sampler(self) -> BatchSampler:
        params = [row.request.params for row in self._rows]
        processors = [row.processors for row in self._rows]
        if self.sampling == "coupled":
            return BatchSampler(params, self.target.device, processors)
        return RejectionSampler(params, self.target.device, processors, chain=self._chain)

    @property
    def _chain(self) -> bool:
        return isinstance(self.policy, Fixed) and self.policy.shape.top_k == 1

    def _keep_up(self, drafts: bool) -> None:
        """Let rows that are far behind read before a round that `drafts`; otherwise only keep what is unread within bounds."""
        behind = [slot for slot, row in enumerate(self._rows) if len(row.unread) > READ_ALONE]
        if not drafts:
            per_token = len(self.target.tap_ids) * self.target.hidden_size * self.target.dtype.itemsize
            if sum(len(row.unread) for row in self._rows) * per_token < UNREAD_BYTES:
                return
        for slot in behind:
            self._catch_up(slot)

    def _draft(self, sampler: BatchSampler) -> DraftTree:
        """Let the drafter read what was committed since it last did, then grow every row's tree."""
        rows, drafter = self._rows, self.drafter
        assert drafter is not None
        unread = [row.unread.take() for row in rows]
        counts = torch.tensor([len(tokens) for tokens, _ in unread])  # [B]
        tokens = pad_sequence([tokens for tokens, _ in unread], True)  # [B, M]
        logits = drafter.extend(tokens, pad_sequence([taps for _, taps in unread], True), counts)  # [B, D]
        lengths = [len(row.ids) for row in rows]

        def rank(level: Tensor, depth: int) -> Tensor:
            return sampler.rank_drafts(level, [n + depth - 1 for n in lengths], drafter.target_ids, depth)

        return self.policy.grow(Drafting(logits, drafter.expand, rank, drafter.target_ids))

    def _walk(
        self, tree: DraftTree, out: TargetOutput, logits: Tensor | None, sampler: BatchSampler
    ) -> tuple[Walk, list[tuple[Tensor, Tensor]]]:
        """Walk the trees. Where the nodes were too many to project at once, those visited are projected now."""
        every = torch.arange(len(self._rows), device=self.target.device)
        lengths = [len(row.ids) for row in self._rows]
        teacher = []

        def choose(nodes: Tensor, step: int, alive: Tensor) -> Tensor:
            if logits is not None:
                visited = logits[every, nodes]  # [B, V]
            else:
                visited = torch.zeros(len(nodes), self.target.vocab_size, device=nodes.device)  # [B, V]
                visited[alive] = self.target.logits(out.hidden[every, nodes][alive])
            if self.features:
                teacher.append(teacher_rows(visited.cpu(), TEACHER_TOP_K))
            drafted = tree.chained(step) if self._chain else None
            tokens = sampler.choose(visited, [n + step for n in lengths], drafted)
            self._chosen(sampler, self._rows, visited, tokens, alive)
            return tokens

        return walk(tree, self.policy.shape.depth, choose), teacher

    def _chosen(self, sampler: BatchSampler, rows: list[Row], logits: Tensor, tokens: Tensor, alive: Tensor) -> None:
        """Tell processors of the `tokens` [B] chosen from `logits` [B, V], and note near-ties and, where asked for,
        log-probabilities."""
        near = near_ties(sampler, logits, self.target.dtype) if self._counts_near_ties else [False] * len(rows)
        for slot, row in enumerate(rows):
            row.stats.near_ties += near[slot] and bool(alive[slot])
            wanted = row.request.params.logprobs
            if (wanted is None and slot not in sampler.processed) or not bool(alive[slot]):
                continue
            token = int(tokens[slot])
            if wanted is not None:
                own = logits[slot].log_softmax(-1)  # [V]
                best = own.topk(wanted)
                top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
                row.logprobs.append(TokenLogprob(token, float(own[token]), top))
            if slot in sampler.processed:
                sampler.see(slot, token)

    def _commit(self, walked: Walk, out: TargetOutput, tree: DraftTree, teacher: list[tuple[Tensor, Tensor]]) -> list[int]:
        """Append each row's walked tokens up to its end, and keep their keys, values and taps; return how many."""
        kept = []
        counts, offered, tokens = walked.counts.tolist(), walked.offered.tolist(), walked.tokens.tolist()
        nodes, drafted = walked.nodes.cpu(), tree.real.sum(1).tolist()  # [B, A], [B]
        for slot, row in enumerate(self._rows):
            taken = row.take(tokens[slot][: counts[slot]], counts[slot] - 1)
            del row.logprobs[len(row.ids) :]
            row.stats.count_round(
                emitted=taken, accepted=min(counts[slot] - 1, taken), drafted=drafted[slot], offered=min(offered[slot], taken)
            )
            kept.append(taken)
            path = nodes[slot, :taken]  # the nodes at which the taken tokens were chosen
            self.cache.commit(slot, path)
            taps = out.taps[slot, path.to(out.taps.device)]  # [taken, nH]
            if self.drafter is not None:
                row.unread.add(walked.tokens[slot, :taken], taps)
            if self.features:
                row.taps.append(apart(taps.cpu(), self.target))
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
        self._sampler = None
        last = len(self._rows) - 1
        if slot != last:
            self.cache.move(last, slot)
            if self.drafter is not None:
                self.drafter.move(last, slot)
            self._rows[slot] = self._rows[last]
        self._rows.pop()
