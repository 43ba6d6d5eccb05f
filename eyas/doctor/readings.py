"""What a loader takes a checkpoint to mean. Loaders agree on the weights and differ in what they read of the configuration.

Sources: vLLM 0.32 `v1/worker/gpu_model_runner.py`, `models/llama_eagle3.py`, `transformers_utils/configs/speculators/algos.py`;
SGLang 0.5.23 `srt/models/llama_eagle3.py`, `models/llama.py` (set_eagle3_layers_to_capture) and
`model_runner_components/spec_aux_hidden_state.py`; llama.cpp `conversion/llama.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.heads.checkpoint import Checkpoint
from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.heads.layouts import flat
from eyas.heads.layouts.names import to_ours
from eyas.heads.layouts.rope import read_rope, write_rope
from eyas.heads.layouts.taps import KEY, write_taps
from eyas.target import Target, default_taps

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "openvino": "OpenVINO", "llamacpp": "llama.cpp"}
MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Reading:
    """A head as one loader would run it: `tensors` by our names without the vocabulary maps, `target_ids` int64 [D] the
    target's id of every draft id, out of the target's range where the maps are broken."""

    config: HeadConfig
    tensors: dict[str, Tensor]
    target_ids: Tensor

    def head(self, target: Target) -> Eagle3Head:
        """The network, float32, its own maps left at the identity: they are judged apart from it."""
        identity = torch.zeros(self.config.draft_vocab_size, dtype=torch.long, device=target.device)
        head = Eagle3Head(self.config, target.embedding.float(), identity)
        head.load_state_dict({**head.state_dict(), **self.tensors})
        return head.to(target.device).eval()


def read_as(engine: str, checkpoint: Checkpoint, target: Target) -> Reading:
    """`checkpoint` as `engine` (a key of ENGINES) reads it.

    Raises EyasError for a variant of the network that eyas does not know, ValidationError for keys that make no sense.
    """
    given = flattened(checkpoint.config)
    believed = {
        **{key: value for key, value in given.items() if key not in ("rope_scaling", "rope_parameters", "rope_theta")},
        **write_taps(believed_taps(engine, given) or default_taps(target.num_layers)),
        **write_rope(believed_rope(given)),
        "norm_before_residual": believed_residual(engine, checkpoint.config),
    }
    tensors = to_ours(checkpoint.tensors)
    config = flat.read(believed, tensors, target)
    ids = _target_ids(tensors.get("d2t"), config).to(target.device)
    return Reading(config, {n: t for n, t in tensors.items() if n not in MAPS}, ids)


def usual_taps(target: Target) -> tuple[int, ...]:
    """The taps that every engine takes where none are named; empty for a target too small to have them."""
    try:
        return default_taps(target.num_layers)
    except EyasError:
        return ()


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what speculators keep under `transformer_layer_config` beside the other keys."""
    layer = config.get("transformer_layer_config")
    return {**config, **layer} if isinstance(layer, dict) else config


def stated_taps(config: dict[str, Any]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The ids at the top level and those in `eagle_config`, each as it stands; None where there are none or no numbers."""
    eagle = config.get("eagle_config")
    return _ids(config.get(KEY)), _ids(eagle.get(KEY)) if isinstance(eagle, dict) else None


def believed_taps(engine: str, config: dict[str, Any]) -> tuple[int, ...] | None:
    """The taps that `engine` would read, as `hidden_states` numbers; None: its default.

    SGLang knows `eagle_config` alone and adds one; llama.cpp the top level alone; vLLM the top level, else `eagle_config` as it
    stands. OpenVINO takes them from the converted model, which the conversion writes from the top level.
    """
    top, eagle = stated_taps(config)
    if engine == "sglang":
        return tuple(i + 1 for i in eagle) if eagle else None
    return top or eagle if engine == "vllm" else top


def believed_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings that all engines take: `rope_parameters` goes before the older keys."""
    if isinstance(config.get("rope_parameters"), dict):
        theta = {} if config["rope_parameters"].get("rope_theta") else {"rope_theta": config.get("rope_theta")}
        return read_rope({"rope_parameters": {**config["rope_parameters"], **theta}})
    return read_rope({"rope_theta": config.get("rope_theta"), "rope_scaling": config.get("rope_scaling")})


def believed_residual(engine: str, config: dict[str, Any]) -> bool:
    """Whether `engine` adds attention to the NORMED state. vLLM assumes so for a speculators config that does not say."""
    if engine == "sglang":
        return False
    assumed = engine == "vllm" and "speculators_model_type" in config
    return bool(config.get("norm_before_residual", assumed))


def _target_ids(d2t: Tensor | None, config: HeadConfig) -> Tensor:
    """int64 [D]; without a usable `d2t` the identity, which is what engines then silently take."""
    identity = torch.arange(config.draft_vocab_size)
    if d2t is None or d2t.shape != identity.shape:
        return identity
    return identity.to(d2t.device) + d2t.long()


def _ids(given: Any) -> tuple[int, ...] | None:
    good = isinstance(given, list) and len(given) == 3 and all(type(i) is int for i in given)
    return tuple(given) if good else None
