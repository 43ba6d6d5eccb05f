"""The frozen target LLM: loading, taps, logits. The only module that touches transformers' model internals.

A target is any causal LM that transformers knows, unforked. A draft tree is verified with a 4-D attention mask, explicit
positions and a cache view of our own (`CacheView`). Taps equal Hugging Face's `hidden_states[i]`: caught by hooks, the raw
state entering layer i; tap L of a target of L layers is the final, normed state.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from eyas.errors import EyasError
from eyas.kernels.attention import attend
from eyas.kernels.build import kernels_ready
from eyas.kernels.fused import FusedLayer, FusedNorm, FusedRotary
from eyas.kernels.packed import Weights, pack_linears
from eyas.kernels.twins import INTERFACE
from eyas.loading import load_model
from eyas.locate import locate

MAX_HEAD_LAYERS = 4  # a head has at most so many; of the target's layers as many are kept unpacked to start it from
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CacheView(Protocol):
    """Where a forward writes its keys and values, and what it may read back.

    `append` stores this forward's keys [B, heads, Q, key_dim] and values [B, heads, Q, value_dim] of one layer and returns
    all the keys [B, heads, K, key_dim] and values that the layer's queries attend over, in the order of the mask's last axis.
    `window` is for a layer that stores its keys and values itself: what `append` would return, and the slots int64 [B, Q] in
    it where they belong; None where nothing is kept.
    """

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...
    def window(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None: ...


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per token: `heads` keys of width `key_dim` and values of width `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class TargetOutput:
    """`hidden` [B, Q, H]: final, normed state. `taps` [B, Q, nH]: the target's taps side by side."""

    hidden: Tensor
    taps: Tensor


class _ViewAsCache:
    """Dresses a `CacheView` as the cache object that transformers' attention layers expect."""

    is_compileable = False

    def __init__(self, view: CacheView, device: torch.device) -> None:
        self.view, self.device = view, device

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        here = keys.device  # another than the cache's for some layers of a target spread over devices
        keys, values = self.view.append(layer_idx, keys.to(self.device), values.to(self.device))
        return keys.to(here), values.to(here)

    def window(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        return self.view.window(layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # only asked for when positions or mask are absent: never here
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class _NoCache:
    """The view of a forward over whole texts: nothing is kept, every layer attends to its own keys."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def window(self, layer: int) -> None:
        return None


class _ShapeProbe(_NoCache):
    """Records what each layer would keep, so that any family's cache can be laid out without knowing the family."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.layers[layer] = LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1])
        return keys, values


def _eyas_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **extra: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface over `kernels.attend`: query [B, Hq, Q, D] -> [B, Q, Hq, Dv]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise EyasError(f"attention with '{name}' is not supported by eyas yet, so this target cannot be used")
    assert attention_mask is not None  # Target.forward always gives one
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, attention_mask, scale), None


AttentionInterface.register(INTERFACE, _eyas_attention)


def transformers_quietly() -> None:
    """Keep transformers' own bars and hints off the terminal; errors still show."""
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high tap: the states entering layers 2, L//2 and L-3 (EAGLE-3, reference code).

    Raises EyasError for targets with fewer than 7 layers, whose default taps would coincide.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if len(set(taps)) != 3 or min(taps) < 0:
        raise EyasError(
            f"a target of {num_layers} layers has no three distinct default taps (would be {list(taps)}); "
            "give them by hand, e.g. taps=(0, 1, 2)"
        )
    return taps


class Target:
    """A frozen causal LM with its tokenizer. Make one with `Target.load` or from a model at hand with `Target(...)`.

    Attributes: `name` (what the user wrote), `fingerprint` (16 hex digits naming weights and architecture, in any dtype),
    `tokenizer`, `hidden_size` H, `vocab_size` V, `num_layers`, `max_length` (context limit, tokens), `tap_ids`, `eos_ids`,
    `layer_shapes` (what each layer caches), `weights` (how the products are packed), `packing` (what that did). What heads
    start from: `embedding` [V, H], `lm_head_weight` [V, H] (the embedding itself where tied), `final_norm_weight` [H] or None,
    and `last_layers`.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, *, name: str,
        taps: tuple[int, ...] | None = None, weights: Weights = "stock",
    ) -> None:  # fmt: skip
        config = model.config.get_text_config()
        if getattr(model, "_is_stateful", False) or "linear_attention" in (getattr(config, "layer_types", None) or []):
            raise EyasError(
                f"target '{name}' is of the family '{config.model_type}', which keeps a recurrent state that a rejected "
                "draft cannot be taken out of again; eyas supports attention-only targets"
            )
        absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if absent:
            raise EyasError(
                f"target '{name}' does not fit its devices: {len(absent)} of its parameters were left out of them, the first "
                f"'{absent[0]}'; give it more room, a smaller --dtype, or a quantised copy"
            )
        self.model = model.eval().requires_grad_(False)
        self.name, self.tokenizer, self.config = name, tokenizer, config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.max_length: int = config.max_position_embeddings
        self.tap_ids = _checked_taps(taps, self.num_layers)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.fingerprint = _fingerprint(model)
        embedding = model.get_input_embeddings().weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self._base: Any = model.get_decoder()
        norm = getattr(self._base, "norm", getattr(self._base, "final_layernorm", None))
        if not hasattr(self._base, "layers") or norm is None:
            raise EyasError(f"target '{name}' is of the family '{config.model_type}', whose layers eyas does not know")
        self._head: Any = model.get_output_embeddings()
        self._caught: dict[int, Tensor] = {}  # of the layers watched, for all targets that share the model
        self._watched: set[int] = set()
        hooks = self._watch_taps()
        model.set_attn_implementation(INTERFACE)
        self._window: int | None = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or [])
        self._mask_by_kind = "sliding_attention" in kinds
        if kinds and not self._mask_by_kind:
            self._window = None  # a window the configuration names but no layer uses
        self.layer_shapes = self._probe()
        # Heads start from these; packing replaces the modules that hold them.
        self.lm_head_weight: Tensor = self._head.weight
        self._last_layers = [dict(layer.named_parameters()) for layer in self._base.layers[-MAX_HEAD_LAYERS:]]
        self.final_norm_weight: Tensor | None = getattr(norm, "weight", None)
        self.packing = pack_linears(model, weights)
        self.weights: Weights = self.packing.weights
        if self.weights != "stock":
            self._head = model.get_output_embeddings()
            for hook in hooks:  # of layers that may have been replaced
                hook.remove()
            self._watched.clear()
            self._watch_taps()

    def tapped(self, taps: tuple[int, ...]) -> Target:
        """This target, the very model, read at other taps. Raises EyasError for taps that it has not."""
        if taps == self.tap_ids:
            return self
        other = copy.copy(self)
        other.tap_ids = _checked_taps(taps, self.num_layers)
        other._watch_taps()
        return other

    @classmethod
    def load(
        cls, spec: str | Path, *, dtype: str = "float32", device: str = "cpu", weights: str = "stock",
        taps: tuple[int, ...] | None = None, device_map: str | dict[str, Any] | None = None,
    ) -> Target:  # fmt: skip
        """Load the target `spec`: "smollm2" (embedded), a GGUF file, a Hugging Face or adapter directory, or a hub id.

        `device_map` spreads a big one over devices, as transformers does (`device` is then not used). `weights` packs the
        linear products: "stock" (torch's own), "fp32", "fp16" or "int8" (see `eyas.kernels.packed`).
        Raises EyasError in one line when the model is missing, broken or of a family that cannot be supported.
        """
        if dtype not in DTYPES:
            raise EyasError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")
        if weights not in get_args(Weights):
            raise EyasError(f"unknown weight packing '{weights}'; choose one of {', '.join(get_args(Weights))}")
        where = device_map if device_map is not None else device
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise EyasError(f"device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
        model, tokenizer = load_model(locate(str(spec)), dtype=DTYPES[dtype], device_map=where, name=str(spec))
        return cls(model, tokenizer, name=str(spec), taps=taps, weights=cast(Weights, weights))

    # -- forwards ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, positions: Tensor, view: CacheView, mask: Tensor, key_positions: Tensor | None = None
    ) -> TargetOutput:
        """One forward over `ids` int64 [B, Q] at `positions` int64 [B, Q].

        `mask` bool [B, 1, Q, K] is True where a query may look; K is the number of keys that `view.append` returns.
        `key_positions` int64 [B, K] gives the keys' positions and is needed by sliding windows only.
        """
        masks: Any = mask
        if self._window is not None:
            if key_positions is None:
                key_positions = positions
            near = positions[:, None, :, None] - key_positions[:, None, None, :] < self._window  # [B, 1, Q, K]
            masks = {"full_attention": mask, "sliding_attention": mask & near} if self._mask_by_kind else mask & near
        cache = _ViewAsCache(view, self.device)
        out = self._base(input_ids=ids, position_ids=positions, attention_mask=masks, cache=cache, use_cache=True)
        hidden = out.last_hidden_state.to(self.device)
        states = {**self._caught, self.num_layers: hidden}
        self._caught.clear()
        return TargetOutput(hidden, torch.cat([states[i].to(self.device) for i in self.tap_ids], dim=-1))

    @torch.inference_mode()
    def read(self, ids: Tensor) -> TargetOutput:
        """The forward over whole texts of equal length, `ids` int64 [B, S], without a cache."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).expand_as(ids)  # [B, S]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()[None, None]  # [1, 1, S, S]
        return self.forward(ids, positions, _NoCache(), causal)

    @torch.inference_mode()
    def states(self, ids: Tensor, layers: Iterable[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Read whole texts `ids` int64 [B, S] once: the final, normed state [B, S, H], and the raw ones entering `layers`.

        Layer `num_layers` stands for what leaves the last one, before the final norm. Raises EyasError for another number.
        """
        caught: dict[int, Tensor] = {}
        blocks = [*self._base.layers, self._base.norm]
        wanted = sorted(set(layers))
        if wanted and not 0 <= wanted[0] <= wanted[-1] <= self.num_layers:
            raise EyasError(f"'{self.name}' has states 0..{self.num_layers}, not {wanted}")
        hooks = [blocks[i].register_forward_pre_hook(_catcher(caught, i), with_kwargs=True) for i in wanted]
        try:
            hidden = self.read(ids).hidden
        finally:
            for hook in hooks:
                hook.remove()
        return hidden, caught

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The target's own vocabulary projection: final normed states [..., H] -> float32 logits [..., V]."""
        return self._head(hidden).float()

    @property
    def inexact(self) -> str | None:
        """What keeps a token's logits from being bit-equal, by construction, in any batch and tree; None: nothing does."""
        if self.weights == "stock":
            if self.device.type != "cpu" or self.dtype != torch.float32:
                kind = str(self.dtype).removeprefix("torch.")
                return f"the row-invariant kernels are for float32 on the CPU, and this target is {kind} on {self.device.type}"
            if not kernels_ready():
                return "the row-invariant kernels could not be built here; they need a C++ compiler"
            return "torch's own products change with the number of rows; use --weights fp32, fp16 or int8"
        if self.packing.left:
            return f"its {self.packing.left[0]} multiplies by torch's own operators"
        norm = getattr(self._base, "norm", getattr(self._base, "final_layernorm", None))
        parts: list[tuple[Any, type[nn.Module]]] = [(module, FusedLayer) for module in self._base.layers]
        parts += [(norm, FusedNorm), (getattr(self._base, "rotary_emb", None), FusedRotary)]
        other = [type(module).__name__ for module, usual in parts if not isinstance(module, usual)]
        return f"its {other[0]} computes by torch's own operators" if other else None

    @property
    def embedding(self) -> Tensor:
        """The input embedding [V, H]."""
        return self.model.get_input_embeddings().weight

    def last_layers(self, count: int) -> list[dict[str, Tensor]]:
        """The parameters of the last `count` decoder layers, by their names inside a layer (`self_attn.q_proj.weight`)."""
        return self._last_layers[-count:]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _watch_taps(self) -> list[Any]:
        """Catch what enters the tapped layers that are not watched yet."""
        fresh = {tap for tap in self.tap_ids if tap < self.num_layers} - self._watched
        self._watched |= fresh
        layers = self._base.layers
        return [layers[tap].register_forward_pre_hook(_catcher(self._caught, tap), with_kwargs=True) for tap in fresh]

    def _probe(self) -> list[LayerShape]:
        """Run one token to learn what every layer caches, and that hidden states and logits are what we take them for."""
        probe = _ShapeProbe()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        out = self.forward(ids, ids, probe, one)
        if sorted(probe.layers) != list(range(self.num_layers)):
            raise EyasError(
                f"target '{self.name}' ({self.config.model_type}) caches only layers {sorted(probe.layers)} of "
                f"{self.num_layers}; eyas supports targets whose every layer is attention with its own cache"
            )
        with torch.inference_mode():
            whole = self.model(input_ids=ids, position_ids=ids, attention_mask=one, use_cache=False).logits.float()
        self._caught.clear()
        if not torch.allclose(self.logits(out.hidden), whole, atol=1e-3, rtol=1e-3):
            raise EyasError(
                f"target '{self.name}' ({self.config.model_type}) changes its logits after the vocabulary projection "
                "(soft-capping or scaling), which eyas does not support yet"
            )
        return [probe.layers[i] for i in range(self.num_layers)]


def _catcher(caught: dict[int, Tensor], layer: int) -> Any:
    """A hook that keeps what enters its module as `caught[layer]`."""

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught[layer] = args[0] if args else kwargs["hidden_states"]

    return catch


def _checked_taps(taps: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    if taps is None:
        return default_taps(num_layers)
    if not taps or len(set(taps)) != len(taps) or not all(0 <= t <= num_layers for t in taps):
        raise EyasError(f"taps must be distinct layer numbers in 0..{num_layers}, not {list(taps)}")
    return tuple(taps)


def _eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a text: the generation config's, the model config's and the tokenizer's."""
    ids: set[int] = set()
    for given in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        if given is not None:
            ids.update(given if isinstance(given, list) else [given])
    return frozenset(ids)


# What of a configuration decides a forward, as families call it; most of it is in no weight.
_FACTS = (
    "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps",
    "rope_parameters", "sliding_window", "layer_types",
    "query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group",
)  # fmt: skip


def _as_fact(value: Any) -> Any:
    """`value` in one spelling: what is None is not there, and a number is a float."""
    if isinstance(value, dict):
        return {str(name): _as_fact(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_as_fact(part) for part in value]
    return float(value) if isinstance(value, int | float) else str(value)


def _fingerprint(model: Any) -> str:
    """16 hex digits over the architecture and a sample of every parameter, rounded to bfloat16 so that dtype plays no part."""
    config = model.config.get_text_config()
    facts = {name: _as_fact(value) for name in _FACTS if (value := getattr(config, name, None)) is not None}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(name.encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
