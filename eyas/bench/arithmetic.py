"""From the rows of a race to its figures: rounds, tau, speeds, and their intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from eyas.bench.figures import PLAIN, Figures, Interval, Part, Run, Turn
from eyas.decoding.stats import Stats

RESAMPLES = 2000
BUCKET = 32  # output positions that are counted together


def rounds_of(accepted: Sequence[bool]) -> list[int]:
    """Tokens emitted by each round, from the per-token record of one answer.

    The first token is prefill's. A round ends with the token that the target wrote itself; the last one may have been
    cut before it, by EOS or the token limit.
    """
    rounds, length = [], 0
    for drafted in accepted[1:]:
        length += 1
        if not drafted:
            rounds.append(length)
            length = 0
    return rounds + [length] * (length > 0)


def tau_of(runs: Iterable[Run]) -> float:
    """Tokens emitted by rounds / rounds; 1 when there was none."""
    return _part([length for run in runs for length in run.rounds]).tau


def by_position(runs: Iterable[Run]) -> dict[str, Part]:
    """The rounds by the bucket of output positions in which they began, like `32-63`; prefill's token is position 0."""
    found: dict[int, list[int]] = {}
    for run in runs:
        position = 1
        for length in run.rounds:
            found.setdefault(position // BUCKET, []).append(length)
            position += length
    return {f"{n * BUCKET}-{(n + 1) * BUCKET - 1}": _part(found[n]) for n in sorted(found)}


def _part(rounds: Sequence[int]) -> Part:
    """What rounds that emitted so many tokens each come to."""
    tau = sum(rounds) / len(rounds) if rounds else 1.0
    return Part(rounds=len(rounds), emitted=sum(rounds), tau=tau)


def bootstrap(columns: np.ndarray, figure: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """`figure` of the column sums, with its 95 % percentile interval over resampled rows.

    columns [N, C]: one row per prompt; figure maps sums [..., C] to values [...].
    """
    value = float(figure(columns.sum(0)))
    picks = np.random.default_rng(0).integers(0, len(columns), (RESAMPLES, len(columns)))
    values = figure(columns[picks].sum(1))  # [RESAMPLES]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Interval(value=value, low=float(low), high=float(high))


def quotient(sums: np.ndarray) -> np.ndarray:
    """First column / second: tokens/s of (tokens, seconds), tau of (emitted, rounds). sums [..., >= 2]."""
    return _divide(sums[..., 0], sums[..., 1])


def speed_ratio(sums: np.ndarray) -> np.ndarray:
    """Speed of the first over speed of the second, from sums [..., 4] of (tokens, seconds, tokens, seconds)."""
    return _divide(sums[..., 0] * sums[..., 3], sums[..., 1] * sums[..., 2])


def chain_length(sums: np.ndarray) -> np.ndarray:
    """Tokens a round of a greedy chain, from sums [..., 2 K] of chains offered at depths 1..K and of those accepted."""
    depth = sums.shape[-1] // 2
    return 1 + np.cumprod(_divide(sums[..., depth:], sums[..., :depth]), -1).sum(-1)


def _divide(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros_like(above, dtype=float), where=below > 0)


def by_prompt(rows: Sequence[Turn]) -> list[list[Turn]]:
    """Rows grouped by prompt: the turns of one conversation are resampled together."""
    groups: dict[tuple[str, str], list[Turn]] = {}
    for row in rows:
        groups.setdefault((row.suite, row.id), []).append(row)
    return list(groups.values())


def speed_columns(groups: Sequence[Sequence[Turn]], names: Sequence[str]) -> np.ndarray:
    """[N, 2 x len(names)]: tokens and decode seconds of each name, one row per prompt."""
    return np.array(
        [
            [sum(value) for name in names for value in zip(*_speed_of(group, name), strict=True)]
            for group in groups
        ],
        dtype=float,
    )  # fmt: skip


def _speed_of(group: Sequence[Turn], name: str) -> list[tuple[float, float]]:
    return [(row.runs[name].tokens, row.runs[name].decode_s) for row in group]


def tau_columns(groups: Sequence[Sequence[Turn]], name: str) -> np.ndarray:
    """[N, 2]: tokens emitted by rounds, and rounds, one row per prompt."""
    rounds = [[length for row in group for length in row.runs[name].rounds] for group in groups]
    return np.array([[sum(r), len(r)] for r in rounds], dtype=float)


def depth_counts(runs: Iterable[Run]) -> Stats:
    """What the runs' rounds offered and accepted at each depth."""
    counts = (
        Stats(rounds=len(r.rounds), by_depth_offered=r.offered_by_depth, by_depth_accepted=r.accepted_by_depth) for r in runs
    )
    return sum(counts, Stats())


def figures_of(
    rows: Sequence[Turn], name: str, *, source: str, head: str, tree: str, peak_mib: float, own_noise: bool = False
) -> Figures:
    """`name`'s figures over all rows."""
    groups = by_prompt(rows)
    runs = [row.runs[name] for row in rows]
    base = [row.runs[PLAIN] for row in rows]
    decode_s, prefill_s = sum(r.decode_s for r in runs), sum(r.prefill_s for r in runs)
    draft = sum(r.draft_s for r in runs) / decode_s
    verify = sum(r.verify_s for r in runs) / decode_s
    against = speed_columns(groups, [name, PLAIN])  # [N, 4]
    depths = depth_counts(runs)
    rounds, drafted = sum(len(r.rounds) for r in runs), sum(r.drafted for r in runs)
    whole = [sum(r.tokens for r in side) / sum(r.decode_s + r.prefill_s for r in side) for side in (runs, base)]
    return Figures(
        source=source,
        head=head,
        tree=tree,
        answers=len(runs),
        tokens=sum(r.tokens for r in runs),
        decode_s=decode_s,
        prefill_s=prefill_s,
        tokens_per_s=bootstrap(against, quotient),
        speedup=bootstrap(against, speed_ratio),
        speedup_with_prefill=whole[0] / whole[1] if whole[1] else 1.0,
        tau=bootstrap(tau_columns(groups, name), quotient),
        n_alpha=depths.n_alpha,
        joint=depths.joint,
        target_forwards=sum(r.target_forwards for r in runs),
        rounds=rounds,
        drafted=drafted,
        k=drafted / rounds if rounds else 0.0,
        accepted=sum(r.accepted for r in runs),
        near_ties=sum(r.near_ties for r in runs),
        share_draft=draft,
        share_verify=verify,
        share_other=max(0.0, 1 - draft - verify),
        peak_mib=peak_mib,
        differing=sum(not r.identical for r in runs),
        own_noise=own_noise,
        parts={
            "suite": _parts(rows, name, lambda row: row.suite, intervals=True),
            "category": _parts(rows, name, _category if len({row.suite for row in rows}) > 1 else lambda row: row.category),
            "turn": _parts(rows, name, lambda row: str(row.turn)),
            "position": by_position(runs),
        },
    )


def _category(row: Turn) -> str:
    """The category's name among those of several suites; a suite without categories is one itself."""
    return row.suite if row.category == row.suite else f"{row.suite}/{row.category}"


def _parts(rows: Sequence[Turn], name: str, key: Callable[[Turn], str], *, intervals: bool = False) -> dict[str, Part]:
    """`name`'s figures of the rows with each `key`; `intervals`: with theirs, where there are several prompts."""
    groups: dict[str, list[Turn]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    found = {}
    for told, group in groups.items():
        part = _part([length for row in group for length in row.runs[name].rounds])
        prompts = by_prompt(group)
        speeds = speed_columns(prompts, [name, PLAIN])
        part.speedup = float(speed_ratio(speeds.sum(0)))
        if intervals and len(prompts) > 1:
            part.tau_interval = bootstrap(tau_columns(prompts, name), quotient)
            part.speedup_interval = bootstrap(speeds, speed_ratio)
        found[told] = part
    return found
