"""Exact or near: near-ties are found and counted, and exact decoding is bit-equal or refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.bench.contestants import parse_contestants
from eyas.bench.items import Item
from eyas.bench.report import figure_rows, footnotes
from eyas.bench.run import Plan, run_bench
from eyas.decoding.engine import Engine, Request, Result
from eyas.decoding.exact import ROUNDING, near_ties, require_exact
from eyas.decoding.sampling import BatchSampler, SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.kernels.build import kernels_ready
from eyas.target import Target
from tests.kinds import ALONE, JOINED, made
from tests.tiny import FAMILIES, SHAPE, VOCAB, tiny_target, tiny_tokenizer

needs_kernels = pytest.mark.skipif(not kernels_ready(), reason="the kernels need a C++ compiler")


def target_of(family: str, weights: str = "stock", dtype: torch.dtype = torch.float32, **settings: object) -> Target:
    torch.manual_seed(0)
    shape: dict[str, Any] = {**SHAPE, **FAMILIES.get(family, {}), **settings}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.7, 1.3) if "norm" in name else parameter.normal_(0, 0.12)
    return Target(model.to(dtype), tiny_tokenizer(), name=f"tiny-{family}", weights=weights)  # type: ignore[arg-type]


# -- near-ties --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_a_second_score_within_rounding_is_a_near_tie(dtype: torch.dtype) -> None:
    bound = 2 * ROUNDING[dtype] * 20.0  # the largest logit is -20
    logits = torch.full((2, 9), -20.0)
    logits[:, 4], logits[0, 7], logits[1, 7] = 10.0, 10.0 - 0.9 * bound, 10.0 - 1.1 * bound
    sampler = BatchSampler([SamplingParams()] * 2)
    assert sampler.choose(logits, [0, 0]).tolist() == [4, 4]
    assert near_ties(sampler, logits, dtype) == [True, False]


def test_near_ties_of_sampled_rows_are_those_of_the_noisy_scores() -> None:
    """Of a greedy and a sampled row: the sampled one's logits are moved until its two best noisy scores nearly tie."""
    params = [SamplingParams(), SamplingParams(temperature=0.5, seed=3)]
    sampler = BatchSampler(params)
    torch.manual_seed(0)
    logits = torch.randn(2, 50) * 3
    bound = 2 * ROUNDING[torch.float32]
    for distance, near in ((1.2, False), (0.8, True)):
        token = int(sampler.choose(logits, [5, 5])[1])
        first, second = sampler.scores[1].topk(2).values.tolist()
        largest = float(logits[1].abs().max())
        logits[1, token] -= 0.5 * (first - second - distance * bound * largest / 0.5)  # scores are logits / 0.5 + noise
        assert int(sampler.choose(logits, [5, 5])[1]) == token
        assert near_ties(sampler, logits, torch.float32) == [False, near]


GREEDY = SamplingParams(max_new_tokens=24, logprobs=2)
WARM = replace(GREEDY, temperature=1.0, top_p=0.9, seed=4)


def answers(
    target: Target, asked: tuple[SamplingParams, ...], *, exact: bool, kind: str = "", rows: int = 1
) -> tuple[Engine, list[Result]]:
    """Answers to a prompt for each of `asked`, drafted by a drafter of `kind` where it is given."""
    of, drafter = made(kind, target) if kind else (target, None)
    engine = Engine(of, drafter, tree=TreeShape(3, 3, 8) if kind else None, max_rows=rows, max_length=96, exact=exact)
    return engine, engine.generate([Request([5 + i, 9, 30, 31, 32 + i], params) for i, params in enumerate(asked)])


def test_near_ties_are_counted_by_the_engine() -> None:
    """Two tokens with the same row of the vocabulary projection tie whenever one of them is chosen."""
    target = target_of("llama")
    plain, _ = answers(target, (GREEDY,) * 4, exact=False)
    chosen = max({i for r in answers(target, (GREEDY,) * 4, exact=False)[1] for i in r.ids if i != 2})
    weight = target.model.get_output_embeddings().weight
    weight.data[(chosen + 1) % VOCAB] = weight.data[chosen]
    engine, results = answers(target, (GREEDY,) * 4, exact=False)
    tied = sum(i in (chosen, (chosen + 1) % VOCAB) for r in results for i in r.ids)
    assert plain.stats.near_ties < tied <= engine.stats.near_ties
    assert engine.stats.near_ties == sum(r.stats.near_ties for r in results)


# -- exact ------------------------------------------------------------------------------------------------------------


@cache
def plain_answers(family: str, weights: str) -> tuple[Target, list[Result]]:
    target = target_of(family, weights)
    plain, results = answers(target, (GREEDY, WARM, WARM), exact=True)
    assert plain.stats.near_ties == 0
    return target, results


PACKED = {"fp32": ("llama", 3), "fp16": ("qwen2", 1), "int8": ("qwen3", 3)}  # family and rows


@needs_kernels
@pytest.mark.parametrize(("kind", "weights"), [*product(ALONE, PACKED), *product(JOINED, ("int8",))])
def test_exact_decoding_is_bit_equal_with_any_drafter_and_in_any_batch(kind: str, weights: str) -> None:
    family, rows = PACKED[weights]
    target, want = plain_answers(family, weights)
    got = answers(target, (GREEDY, WARM, WARM), exact=True, kind=kind, rows=rows)[1]
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.ids, mine.logprobs) == (theirs.ids, theirs.logprobs)  # the very same floats


@needs_kernels
def test_what_is_not_exact_is_refused_in_one_line() -> None:
    with pytest.raises(EyasError, match="use --weights fp32, fp16 or int8"):
        Engine(tiny_target(), exact=True)
    with pytest.raises(EyasError, match="under rejection sampling"):
        Engine(tiny_target(), exact=True, sampling="rejection")
    with pytest.raises(EyasError, match="this target is bfloat16 on cpu"):
        require_exact(target_of("llama", dtype=torch.bfloat16))
    with pytest.raises(EyasError, match="its GemmaDecoderLayer computes by torch's own operators"):
        require_exact(target_of("gemma", "fp32", head_dim=16))
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    with pytest.raises(EyasError, match="multiplies by torch's own operators"):
        require_exact(target_of("qwen3_moe", "fp32", **experts))


@needs_kernels
def test_a_report_says_which_grade_it_is_of() -> None:
    items = [Item("a", "suite", "", ids=(5, 9, 30, 31))]
    plan, plain = Plan(items, SamplingParams(max_new_tokens=8, ignore_eos=True)), parse_contestants([])
    (report,) = run_bench(tiny_target(), plain, plan).races
    assert ("near-ties", [str(report.rows[0].runs["plain"].near_ties)]) in list(figure_rows(report))
    assert "tokens exact up to near-ties" in footnotes(report)[0]
    with pytest.raises(EyasError, match="exact decoding is not possible"):
        run_bench(tiny_target(), plain, plan, exact=True)
    (exact,) = run_bench(target_of("llama", "fp32"), plain, plan, exact=True).races
    assert "near-ties" not in dict(figure_rows(exact))
    assert "tokens bit-exact" in footnotes(exact)[0]


def test_without_kernels_exact_decoding_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.target.kernels_ready", lambda: False)
    with pytest.raises(EyasError, match="need a C\\+\\+ compiler"):
        require_exact(tiny_target())
