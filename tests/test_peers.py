"""Peers: other decoders write what plain decoding writes, and tell of themselves what is so."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from eyas.bench.arithmetic import rounds_of
from eyas.bench.contestants import Contestant, enter
from eyas.bench.figures import PLAIN, Entry
from eyas.bench.grid import Report
from eyas.bench.items import Item
from eyas.bench.peers import open_peer, stock
from eyas.bench.peers.llamacpp import LlamaCppPeer
from eyas.bench.peers.openvino import OpenVinoPeer
from eyas.bench.peers.peer import counted, result_of
from eyas.bench.peers.watch import Forward
from eyas.bench.peers.worker import Worker
from eyas.bench.race import Rules, race
from eyas.bench.report import figure_rows
from eyas.bench.run import Plan, run_bench
from eyas.cli.app import app
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.stats import Stats
from eyas.errors import EyasError
from eyas.target import Target
from tests.tiny import save_target, tiny_target

NEW = 14


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    yield Target.load(str(save_target(tiny_target(), tmp_path_factory.mktemp("target"))))
    stock.stock_model.cache_clear()


@pytest.fixture(scope="module")
def sibling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same tokens that seldom agrees."""
    return save_target(tiny_target(seed=1), tmp_path_factory.mktemp("sibling"))


def requests(**params) -> list[Request]:
    """Prompts of several lengths, of which one repeats itself."""
    told = SamplingParams(max_new_tokens=NEW, **params)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in (9, 17, 12)]
    return [Request(ids, told, f"r{n}") for n, ids in enumerate([*prompts, prompts[0] * 3])]


def plain(target: Target, asked: list[Request]) -> list[list[int]]:
    return [result.ids for result in Engine(target, max_rows=4, max_length=128).generate(asked)]


@pytest.mark.parametrize(
    "source", ["peer:generate", "peer:lookup", "peer:lookup:3", "peer:assisted:TARGET", "peer:assisted:SIBLING"]
)
def test_greedy_tokens_are_plain_decodings(source: str, target: Target, sibling: Path) -> None:
    source = source.replace("TARGET", target.name).replace("SIBLING", str(sibling))
    peer = open_peer(source, target, 3, 128)
    for asked in (requests(), requests(ignore_eos=True)):
        results = peer.generate(iter(asked))
        assert [r.ids for r in results] == plain(target, asked)
        for request, result in zip(asked, results, strict=True):
            stats = result.stats
            assert (result.id, result.prompt_len) == (request.id, len(request.ids))
            assert len(result.accepted) == len(result.ids) <= NEW
            assert stats.accepted <= stats.drafted and stats.prefill_s > 0
            assert stats.target_forwards == len(result.ids) - stats.accepted  # each emits a token of its own
    assert "stock float32 weights, sdpa attention" in peer.policy


def test_an_answer_ends_with_its_first_end_of_text(target: Target) -> None:
    """The end is taken to be a token that a greedy answer comes to, in some rows of the batch before others."""
    asked = requests(ignore_eos=True)
    end = plain(target, asked)[0][5]
    before, target.eos_ids = target.eos_ids, frozenset({end})
    try:
        asked = requests()
        expected = plain(target, asked)
        assert {len(ids) for ids in expected} != {NEW} and expected[0][-1] == end
        for source in ("peer:generate", "peer:lookup"):
            results = open_peer(source, target, 4, 128).generate(asked)
            assert [r.ids for r in results] == expected
            assert [r.finish for r in results] == ["eos" if ids[-1] == end else "length" for ids in expected]
    finally:
        target.eos_ids = before


def test_the_targets_own_copy_accepts_all_it_is_offered(target: Target) -> None:
    """An assistant that is the target: every draft is right, and rounds are as long as they are drafted."""
    peer = open_peer(f"peer:assisted:{target.name}", target, 1, 128)
    (result,) = peer.generate(requests(ignore_eos=True)[:1])
    assert result.stats.accepted == result.stats.drafted > 0
    assert sum(result.accepted) == result.stats.accepted
    assert result.stats.tau > 1.5 and result.stats.draft_s > 0


def test_sampling_has_its_own_noise_and_is_reproducible(target: Target) -> None:
    for source in ("peer:generate", "peer:lookup"):
        peer = open_peer(source, target, 4, 128)
        first, again = (
            [r.ids for r in peer.generate(requests(temperature=1.0, top_k=50, top_p=0.9, seed=5))] for _ in range(2)
        )
        other = [r.ids for r in peer.generate(requests(temperature=1.0, top_k=50, top_p=0.9, seed=6))]
        assert first == again != other
    with pytest.raises(EyasError, match=r"does not take repetition_penalty 1\.2 as eyas does"):
        peer.generate(requests(repetition_penalty=1.2))


def test_peers_race(target: Target) -> None:
    peers = {name: open_peer(f"peer:{name}", target, 2, 128) for name in ("generate", "lookup")}
    entries = {name: Entry(name=name, source=f"peer:{name}") for name in peers}
    items = [Item(f"q{n}", "toy", "toy", ({"role": "user", "content": "one two one two " * n},)) for n in (1, 2)]
    engines = {PLAIN: Engine(target, max_rows=2, max_length=128), **peers}
    params, rules = SamplingParams(max_new_tokens=NEW, ignore_eos=True), Rules(batch=2, noise=0)
    report = race(target, engines, items, params, entries=entries, rules=rules)
    assert [f.differing for f in report.drafters.values()] == [0, 0, 0]
    generate, lookup = report.drafters["generate"], report.drafters["lookup"]
    assert generate.tau.value == 1 and generate.target_forwards == 2 * NEW
    assert dict(figure_rows(report))["near-ties"][1:] == ["-", "-"]  # which a peer does not count
    silent = generate.model_copy(update={"share_draft": 0.0, "share_verify": 0.0, "share_other": 1.0})
    told = dict(figure_rows(report.model_copy(update={"drafters": {PLAIN: report.drafters[PLAIN], "silent": silent}})))
    assert told["time"][1] == "-" and told["time"][0] != "-"
    assert lookup.drafted >= lookup.accepted >= 0 and lookup.tau.value >= 1


def test_the_command_races_peers_and_calls_their_own_draws_no_fault(target: Target, tmp_path: Path, capsys) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    told = ["--prompts", str(prompts), "--max-new-tokens", "8", "--temperature", "0,1", "--json", str(tmp_path / "r.json")]
    app(["bench", "--target", target.name, "--drafter", "peer:generate", *told], standalone_mode=False)
    greedy, sampled = (found.drafters["generate"] for found in Report.read(tmp_path / "r.json").races)
    assert greedy.same == "yes" and sampled.same == "own draws"
    assert "own draws" in capsys.readouterr().out
    with pytest.raises(EyasError, match="takes no tree"):
        app(["bench", "--target", target.name, "--drafter", "peer:generate@chain:3", *told], standalone_mode=False)


def test_rounds_are_read_as_ours_are(target: Target) -> None:
    """The prompt's forward emits a token, then rounds of 3, 1 and 2; the text ends inside the last one."""
    request = Request([5, 6], SamplingParams(max_new_tokens=6))
    stats = counted(Stats(), [1, 3, 1, 2], [0, 4, 4, 4])
    result = result_of(request, target, [9, 10, 11, 12, 13, 14, 15], [1, 3, 1, 2], stats, frozenset({99}))
    assert result.ids == [9, 10, 11, 12, 13, 14] and result.finish == "length"
    assert result.accepted == [False, True, True, False, False, True]
    assert (stats.rounds, stats.emitted, stats.drafted, stats.accepted, stats.target_forwards) == (3, 6, 12, 3, 4)
    assert stats.by_depth_accepted == [2, 1, 0, 0]


def test_what_the_prompts_forward_accepts_is_a_round_whose_verification_is_decoding(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 8 tokens is read with 2 drafts in 10 s; all 3 tokens it can bring come. The assistant read the prompt in
    0.5 s and drafted for 0.25 s before it, and for 0.25 s after it."""
    peer = open_peer("peer:lookup:2", target, 1, 128)
    drafts = [Forward(8, 0, 0.0, 0.5), Forward(1, 8, 0.5, 0.75), Forward(1, 10, 11.5, 11.75)]
    seen = [Forward(10, 0, 1.0, 11.0), Forward(3, 10, 12.0, 14.0)]

    @contextmanager
    def watched(_: object) -> Iterator[list[Forward]]:
        yield drafts

    monkeypatch.setattr(stock, "watched", watched)
    monkeypatch.setattr(peer, "_run", lambda group: ([[20, 21, 22, 23, 24]], seen, 0.0))
    (result,) = peer.generate([Request(list(range(3, 11)), SamplingParams(max_new_tokens=5, ignore_eos=True))])
    stats = result.stats
    assert result.accepted == [True, True, False, True, False]
    assert stats.prefill_s == pytest.approx(11.0 - 10.0 * 2 / 10 - 0.25)
    assert stats.verify_s == pytest.approx(10.0 * 2 / 10 + 2.0) and stats.draft_s == pytest.approx(0.5)
    assert (stats.target_forwards, stats.drafted, stats.accepted) == (2, 4, 3)
    assert (stats.rounds, stats.emitted) == (2, 4)  # the first token is prefill's, as everywhere
    assert rounds_of(result.accepted) == [2, 2]


def test_what_is_missing_is_told_in_one_line(target: Target, sibling: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EYAS_LLAMACPP_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("EYAS_OPTIMUM_CLI", str(tmp_path / "nothing"))
    (tmp_path / "head.gguf").touch()
    (tmp_path / "openvino_model.xml").touch()
    cases = {
        "peer:other": "no peer 'peer:other'; there are: peer:generate, peer:lookup",
        "peer:generate:x": "takes nothing after its name",
        "peer:lookup:x": "give a number of tokens to draft",
        "peer:assisted": "wants the model that drafts",
        f"peer:assisted:{tmp_path}": "holds no config.json",
        f"peer:llamacpp:{sibling}": "eyas export HEAD --to gguf",
        f"peer:llamacpp:{tmp_path}": "llama.cpp is not in .*; run: make",
        f"peer:openvino:{sibling}": "eyas export HEAD --to openvino",
        f"peer:openvino:{tmp_path}": "install optimum 2.3.0",
    }
    for source, told in cases.items():
        with pytest.raises(EyasError, match=told) as raised:
            open_peer(source, target, 1, 128)
        assert "\n" not in str(raised.value)


def scripted(*lines: str) -> Worker:
    """A program that shows `lines` one by one, each for a line that it is told, and what it was told behind the last."""
    script = (
        "import sys\nheard = []\n"
        f"for line in {list(lines)!r}:\n heard.append(input())\n print(line, flush=True)\n"
        "input()\nprint(heard, flush=True)"
    )
    return Worker("it", [sys.executable, "-c", script])


def heard(worker: Worker) -> list[str]:
    worker.say("")
    return list(ast.literal_eval(worker.hear(b"\n")))


def test_llamacpps_rounds_are_read_from_what_it_writes(target: Target) -> None:
    worker = scripted("20 | 21 22 23 | 24 | 25 26 ")
    peer = LlamaCppPeer(target, 64, worker, engine="llama.cpp 0.5.0")
    assert peer.policy == "llama.cpp 0.5.0, chain:3, float32; one request at a time"
    (result,) = peer.generate([Request([5, 6, 7], SamplingParams(max_new_tokens=6), "q")])
    assert heard(worker) == ["6 5 6 7"]
    assert (result.id, result.prompt_len, result.ids) == ("q", 3, [20, 21, 22, 23, 24, 25])  # cut at the limit
    assert result.accepted == [False, True, True, False, False, True] and result.finish == "length"
    stats = result.stats
    assert (stats.target_forwards, stats.rounds, stats.drafted, stats.accepted) == (4, 3, 9, 3)
    assert stats.prefill_s > 0 and stats.verify_s == stats.draft_s == 0  # which it does not tell
    (plain,) = LlamaCppPeer(target, 64, scripted("20 | 21 | 22 "), head=False).generate(
        [Request([5], SamplingParams(max_new_tokens=9))]
    )
    assert plain.ids == [20, 21, 22] and plain.stats.drafted == 0 and plain.stats.tau == 1
    for params in (SamplingParams(temperature=1.0), SamplingParams(ignore_eos=True)):
        with pytest.raises(EyasError, match=r"peer:llamacpp does not take (temperature 1\.0|ignore_eos True) as eyas does"):
            peer.generate([Request([5], params)])


def test_openvinos_rounds_are_read_from_what_it_writes(target: Target) -> None:
    end = min(target.eos_ids)
    worker = scripted(
        json.dumps({"ids": [20, 21, 22, 23], "rounds": [1, 2, 1], "first_s": 0.25}),
        json.dumps({"ids": [20, end, 21], "rounds": [1, 2], "first_s": 0.5}),
    )
    peer = OpenVinoPeer(target, 64, worker, "OpenVINO GenAI 2026.4.1")
    assert peer.policy == "OpenVINO GenAI 2026.4.1, chain:3, float32; one request at a time"
    free = Request([5, 6], SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=0.5, top_k=7, seed=3))
    ending = Request([7], SamplingParams(max_new_tokens=9))
    first, second = peer.generate([free, ending])
    jobs = [json.loads(line) for line in heard(worker)]
    assert jobs[0] == {
        "ids": [5, 6], "new": 4, "eos": [], "draft": 3, "temperature": 0.5, "top_p": 1.0, "top_k": 7, "seed": 3
    }  # fmt: skip
    assert jobs[1]["eos"] == sorted(target.eos_ids) and jobs[1]["temperature"] == 0
    assert first.ids == [20, 21, 22, 23] and first.accepted == [False, True, False, False] and first.finish == "length"
    assert (first.stats.prefill_s, first.stats.rounds, first.stats.drafted, first.stats.accepted) == (0.25, 2, 6, 1)
    assert second.ids == [20, end] and second.finish == "eos" and second.accepted == [False, True]
    with pytest.raises(EyasError, match=r"peer:openvino does not take min_p 0\.1 as eyas does"):
        peer.generate([replace(free, params=SamplingParams(temperature=1.0, min_p=0.1))])


def test_memory_of_a_program_of_its_own_is_not_ours(target: Target) -> None:
    item = Item("q", "toy", "toy", ids=(5, 6, 7))
    racers = {PLAIN: Engine(target, max_length=64), "llamacpp": LlamaCppPeer(target, 64, scripted("20 | 21 ", "20 | 21 "))}
    entries = {"llamacpp": Entry(name="llamacpp", source="peer:llamacpp:x")}
    report = race(target, racers, [item], SamplingParams(max_new_tokens=4), entries=entries, rules=Rules(noise=0))
    assert report.drafters[PLAIN].peak_mib > 0 and report.drafters["llamacpp"].peak_mib == 0
    assert dict(figure_rows(report))["peak memory"][1] == "-"


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp and OpenVINO as far as their versions can be read, and heads for them in `folder`."""
    (folder / "lib").mkdir()
    for name in ("lib/chain", "lib/libllama.v0.5.0.so", "optimum-cli", "head.gguf", "openvino_model.xml"):
        (folder / name).write_text(name)
    (folder / "python").write_text("#!/bin/sh\necho 2026.4.1\n")
    (folder / "python").chmod(0o755)
    monkeypatch.setenv("EYAS_LLAMACPP_HOME", str(folder))
    monkeypatch.setenv("EYAS_OPTIMUM_CLI", str(folder / "optimum-cli"))


def test_an_entry_names_the_engine_and_the_weights_that_it_drafts_with(
    target: Target, sibling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch)

    def entry(source: str) -> Entry:
        return enter(Contestant("x", source), target).entry

    heads = {"llamacpp": ("head.gguf", "llama.cpp 0.5.0"), "openvino": ("openvino_model.bin", "OpenVINO GenAI 2026.4.1")}
    for kind, (file, engine) in heads.items():
        before = entry(f"peer:{kind}:{tmp_path}")
        assert len(before.hash) == 12 and before.engine == engine and engine in str(before)
        (tmp_path / file).write_text("trained further")
        assert entry(f"peer:{kind}:{tmp_path}").hash != before.hash
    assert entry("peer:lookup") == Entry(name="x", source="peer:lookup", engine=f"transformers {transformers.__version__}")
    assert len(entry(f"peer:assisted:{sibling}").hash) == 12
    with pytest.raises(EyasError, match="no peer 'peer:other'"):
        entry("peer:other")


def test_what_a_peer_cannot_do_is_said_before_the_first_race(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch)
    monkeypatch.setattr("eyas.bench.run.race", lambda *_, **__: pytest.fail("raced"))
    calm, stern = Item("calm", "log", "log", ids=(5, 6)), Item("stern", "log", "log", ids=(5, 6), sampling={"stop": ("x",)})
    contestants = [Contestant(PLAIN, PLAIN), Contestant("llamacpp", f"peer:llamacpp:{tmp_path}")]
    with pytest.raises(EyasError, match=r"does not take temperature 1\.0 as eyas does; leave it out of a race against it"):
        run_bench(target, contestants, Plan([calm], SamplingParams(), (0.0, 1.0)))
    for source in (f"peer:llamacpp:{tmp_path}", "peer:lookup", "peer:generate", f"peer:openvino:{tmp_path}"):
        contestants = [Contestant(PLAIN, PLAIN), Contestant("it", source)]
        with pytest.raises(EyasError, match=r"prompt 'stern' of suite 'log': peer:.* does not take stop \('x',\)"):
            run_bench(target, contestants, Plan([calm, stern], SamplingParams()))


def test_a_worker_that_ends_says_why() -> None:
    worker = Worker("it", [sys.executable, "-c", "print(input()[::-1], flush=True); raise SystemExit('out of words')"])
    worker.say("abc")
    assert worker.hear(b"\n") == "cba\n"
    with pytest.raises(EyasError, match="it ended with 1: out of words"):
        worker.hear(b"\n")
