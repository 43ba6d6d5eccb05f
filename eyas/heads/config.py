"""What an EAGLE-3 head is: every size and switch, validated in one place and saved beside the weights."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.errors import EyasError
from eyas.heads.rope import inverse_frequencies
from eyas.progress import console
from eyas.target import Target

DRAFT_VOCABULARY = 8192  # default size; the head's largest product, and most texts use fewer distinct tokens


class HeadConfig(BaseModel):
    """Shape of a head. H = target width, h = head width, V and D = target and draft vocabulary.

    `tap_ids` follow one convention: tap i is Hugging Face's `hidden_states[i]`, the state ENTERING layer i.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(gt=0, description="h, the head's width")
    target_hidden_size: int = Field(gt=0, description="H, the width of each tap")
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, description="need not be hidden_size / num_attention_heads")
    vocab_size: int = Field(gt=0, description="V, the target's vocabulary")
    draft_vocab_size: int = Field(gt=0, description="D, the head's own vocabulary")
    tap_ids: tuple[int, int, int]
    target_layers: int = Field(gt=0, description="layers of the target the head was trained for")
    target_name: str = ""
    target_fingerprint: str = ""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = Field(gt=0)
    norm_before_residual: bool = Field(default=False, description="residual is the normed state (speculators' default)")

    @model_validator(mode="after")
    def _consistent(self) -> HeadConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads evenly"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft vocabulary {self.draft_vocab_size} is larger than the target's {self.vocab_size}")
        try:
            inverse_frequencies(self.rope, self.head_dim)
        except (EyasError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"rope {self.rope} cannot be used: {error}") from error
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, so rotary positions cannot be applied")
        return self

    @classmethod
    def for_target(cls, target: Target, *, draft_vocab_size: int | None = None) -> HeadConfig:
        """The head that fits `target`: its width, heads, rope and position limit, three taps, one layer."""
        config = target.config
        heads = config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        if not isinstance(rope.get("rope_theta"), int | float):  # one entry per layer kind: take that of full attention
            rope = dict(rope.get("full_attention") or {"rope_type": "default", "rope_theta": 10000.0})
        return cls(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or target.hidden_size // heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=min(draft_vocab_size or DRAFT_VOCABULARY, target.vocab_size),
            tap_ids=target.tap_ids,
            target_layers=target.num_layers,
            target_name=target.name,
            target_fingerprint=target.fingerprint,
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope=rope,
            max_position_embeddings=target.max_length,
        )

    def check_target(self, target: Target) -> None:
        """Raise EyasError, in one line, when this head was not made for `target`."""
        facts = {
            "hidden width": (self.target_hidden_size, target.hidden_size),
            "vocabulary": (self.vocab_size, target.vocab_size),
            "number of layers": (self.target_layers, target.num_layers),
        }
        for what, (head, model) in facts.items():
            if head != model:
                raise EyasError(
                    f"this head was trained for another target ({self.target_name or 'unnamed'}): its {what} is {head}, "
                    f"that of '{target.name}' is {model}; give the target it was trained for, or train a head for this one"
                )
        if self.target_fingerprint not in ("", target.fingerprint):
            console.print(
                f"note: this head was trained for {self.target_name} ({self.target_fingerprint}), not for "
                f"{target.name} ({target.fingerprint}); the text stays right, but fewer drafts may be accepted",
                style="yellow", markup=False,
            )  # fmt: skip
        if self.tap_ids != target.tap_ids:
            raise EyasError(
                f"this head reads taps {list(self.tap_ids)}, the target '{target.name}' was loaded with "
                f"{list(target.tap_ids)}; load the target with taps={list(self.tap_ids)}"
            )
