"""The options of a head against the formulas written out plainly, on disk, and in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from eyas.data.batches import Batch
from eyas.decoding.drafters import Eagle3Drafter
from eyas.decoding.engine import Engine, Request
from eyas.decoding.sampling import SamplingParams
from eyas.decoding.tree import TreeShape
from eyas.errors import EyasError
from eyas.heads.config import HeadConfig, HeadOptions
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.files import load_head, save_head
from eyas.heads.rope import rotate
from eyas.heads.start import new_head
from eyas.heads.vocab import choose_vocabulary
from eyas.training.unroll import loss_masks, unroll
from tests.test_unroll import OPTIONS, random_head, some_texts
from tests.tiny import VOCAB, tiny_target

D2T = choose_vocabulary(torch.zeros(VOCAB, dtype=torch.long), 120)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def plain_forward(head: Eagle3Head, taps: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Step 0 of a head over one text, from its tensors and the formulas alone: (states handed on [S, h], logits [S, D])."""
    w, c = head.state_dict(), head.config

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    if c.fc_norm:
        taps = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(taps.chunk(3, -1))], -1)
    state = linear(taps, "fc")
    embedding = w["embed_tokens.weight"] if c.own_embedding else head.embedding
    positions, length = torch.arange(len(tokens)), len(tokens)
    for n in range(c.num_layers):
        p = f"layers.{n}." if n else "midlayer."
        if n:
            x = rms(state, w[p + "input_layernorm.weight"])
        else:
            parts = rms(embedding[tokens], w[p + "input_layernorm.weight"]), rms(state, w[p + "hidden_norm.weight"])
            x = torch.cat(parts, -1)
            state = parts[1] if c.norm_before_residual else state
        q, k, v = (linear(x, f"{p}self_attn.{name}_proj").view(length, -1, c.head_dim) for name in "qkv")
        if c.qk_norm:
            q, k = rms(q, w[p + "self_attn.q_norm.weight"]), rms(k, w[p + "self_attn.k_norm.weight"])
        q, k = (rotate(t, positions, head.inverse_frequencies).transpose(0, 1) for t in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v.transpose(0, 1), is_causal=True, enable_gqa=True)
        s = state + linear(attended.transpose(0, 1).flatten(1), f"{p}self_attn.o_proj")
        y = rms(s, w[p + "post_attention_layernorm.weight"])
        state = s + linear(F.silu(linear(y, f"{p}mlp.gate_proj")) * linear(y, f"{p}mlp.up_proj"), f"{p}mlp.down_proj")
    normed = rms(state, w["norm.weight"])
    return (normed if c.norm_output else state), normed @ w["lm_head.weight"].T


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_the_forward_is_the_formulas(options: dict[str, object]) -> None:
    target = tiny_target("qwen3")
    head = random_head(target, **options)
    text = some_texts(target)[0]
    batch = Batch.of([text])
    with torch.no_grad():
        step = next(iter(unroll(head, batch, loss_masks(head, batch, 1))))
        states, logits = plain_forward(head, text.float_taps, text.ids[1:])
    assert torch.allclose(step.states, states[step.slots], atol=1e-4)
    assert torch.allclose(step.logits, logits[step.slots], atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_head_with_options_is_saved_loaded_and_decodes_the_same_tokens(options: dict[str, object], tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    head = new_head(target, D2T, options=HeadOptions(**options))
    save_head(head, tmp_path)
    back = load_head(tmp_path, target)
    assert back.config == head.config
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    request = Request(some_texts(target)[0].ids[:9].tolist(), SamplingParams(max_new_tokens=12))
    plain = Engine(target, max_length=64).generate([request])[0]
    drafted = Engine(target, Eagle3Drafter(target, back), tree=TreeShape(3, 3, 7), max_length=64).generate([request])[0]
    assert drafted.ids == plain.ids


def test_the_warm_start_fills_every_layer_from_the_target() -> None:
    target = tiny_target("qwen3")
    head = new_head(target, D2T, options=HeadOptions(num_layers=2, qk_norm=True))
    before, last = target.last_layers(2)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight[:, 64:], before["self_attn.q_proj.weight"])
    assert not head.midlayer.self_attn.q_proj.weight[:, :64].any()
    assert torch.equal(head.layers["1"].self_attn.k_proj.weight, last["self_attn.k_proj.weight"])
    assert torch.equal(head.layers["1"].self_attn.q_norm.weight, last["self_attn.q_norm.weight"])
    assert torch.equal(head.layers["1"].input_layernorm.weight, last["input_layernorm.weight"])


def test_a_narrow_heads_embedding_is_the_best_of_its_width() -> None:
    target = tiny_target("llama")
    head = new_head(target, D2T, options=HeadOptions(hidden_size=48))
    embedding = target.embedding
    u, s, v = torch.linalg.svd(embedding, full_matrices=False)
    kept = head.embedding @ torch.linalg.pinv(head.embedding) @ embedding  # [V, H], projected onto the head's columns
    assert torch.allclose(kept, (u[:, :48] * s[:48]) @ v[:48], atol=1e-3)
    assert head.embed_tokens is not None and head.embed_tokens.weight.requires_grad


def test_options_that_make_no_sense_are_told() -> None:
    target = tiny_target("llama")
    for wrong in ({"num_layers": 0}, {"num_layers": 9}, {"hidden_size": -1}, {"depth": 2}):
        with pytest.raises(ValidationError):
            HeadOptions(**wrong)
    with pytest.raises(EyasError, match="load the target with taps"):
        HeadConfig.for_target(target, options=HeadOptions(taps=(0, 1, 2)))
