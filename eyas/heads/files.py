"""A head on disk: `config.json` and `model.safetensors` in the authors' layout, which serving engines read as it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError, first_fault
from eyas.files import replacing, sha256, write_text
from eyas.heads.config import HeadConfig
from eyas.heads.eagle3 import Eagle3Head
from eyas.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FORMAT = "eyas_head"  # the key of config.json under which the whole HeadConfig stands


def save_head(head: Eagle3Head, folder: Path | str) -> None:
    """Write `head` to `folder`, replacing what is there only when the new files are whole.

    Raises EyasError when the disk is full or the folder cannot be written.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    with replacing(folder / WEIGHTS) as part:
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(0o644)  # a server may run as another user
    write_text(folder / CONFIG, json.dumps(engine_config(head.config), indent=2))


def engine_config(config: HeadConfig) -> dict[str, Any]:
    """config.json: the keys serving engines read, and our own record of the head under one key of its own."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.get("rope_theta", 10000.0),
        "rope_parameters": config.rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "torch_dtype": "float32",
        # one convention a place: vLLM and llama.cpp read the top level as it stands, SGLang adds one to eagle_config's
        "eagle_aux_hidden_state_layer_ids": list(config.tap_ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [t - 1 for t in config.tap_ids]},
        _FORMAT: config.model_dump(mode="json"),
    }


def load_head(folder: Path | str, target: Target) -> Eagle3Head:
    """Read the head in `folder` for `target`: every tensor is used and every parameter set, or the load fails.

    Raises EyasError, in one line, for a missing or damaged file, a missing or left-over tensor, a wrong shape or a head
    that was made for another target.
    """
    folder = Path(folder)
    config = read_config(folder)
    config.check_target(target)
    try:
        tensors = load_file(folder / WEIGHTS, device=str(target.device))
    except FileNotFoundError:
        raise EyasError(f"the head {folder} has no {WEIGHTS}") from None
    except (SafetensorError, OSError) as error:
        raise EyasError(f"{folder / WEIGHTS} is damaged: {str(error).splitlines()[0]}; train or copy it again") from error
    d2t = tensors.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long, device=target.device))
    if "d2t" not in tensors and config.draft_vocab_size != config.vocab_size:
        raise EyasError(f"the head {folder} has a reduced vocabulary but no tensor 'd2t' that says which one")
    _check_vocabulary(folder, config, d2t, tensors.get("t2d"))
    head = Eagle3Head(config, target.embedding.float(), d2t)
    wanted = head.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            if name in ("d2t", "t2d"):  # derived above
                continue
            raise EyasError(f"the head {folder} lacks the tensor '{name}'")
        if name not in wanted:
            raise EyasError(f"the head {folder} holds the tensor '{name}', which no EAGLE-3 head has")
        if tensors[name].shape != wanted[name].shape:
            raise EyasError(
                f"the head {folder}: tensor '{name}' has shape {list(tensors[name].shape)}, its config says "
                f"{list(wanted[name].shape)}"
            )
    head.load_state_dict({**wanted, **tensors})
    return head.to(target.device).eval()


def read_config(folder: Path | str) -> HeadConfig:
    """The configuration of the head in `folder`. Raises EyasError when there is none or it makes no sense."""
    path = Path(folder) / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise EyasError(f"no head in {folder}: {CONFIG} is missing") from None
    except (OSError, ValueError) as error:
        raise EyasError(f"{path} is damaged: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get(_FORMAT), dict):
        raise EyasError(f"{path} describes no head that eyas wrote")
    try:
        return HeadConfig(**raw[_FORMAT])
    except ValidationError as error:
        raise EyasError(f"{path}: {first_fault(error)}") from error


def head_hash(folder: Path | str) -> str:
    """12 hex digits naming the weights in `folder`; reported with every number measured with them."""
    return sha256(Path(folder) / WEIGHTS)[:12]


def _check_vocabulary(folder: Path, config: HeadConfig, d2t: torch.Tensor, t2d: torch.Tensor | None) -> None:
    """The two maps must be there in full, point into the target's vocabulary, and agree."""
    if d2t.shape != (config.draft_vocab_size,) or d2t.dtype != torch.long:
        raise EyasError(
            f"the head {folder}: d2t is {d2t.dtype} of shape {list(d2t.shape)}, not int64 of [{config.draft_vocab_size}]"
        )
    ids = Eagle3Head.draft_ids(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) != len(ids):
        raise EyasError(
            f"the head {folder}: d2t does not map draft ids one to one into the target's {config.vocab_size} tokens "
            "(it must hold offsets: target id = draft id + d2t)"
        )
    if t2d is not None and (int(t2d.sum()) != len(ids) or not bool(t2d[ids].all())):
        raise EyasError(f"the head {folder}: t2d and d2t name different tokens")
