"""What a head is: every size and switch, validated in one place and saved beside the weights."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.errors import EyasError
from eyas.heads.rope import inverse_frequencies
from eyas.progress import console
from eyas.target import MAX_HEAD_LAYERS, Target

DRAFT_VOCABULARY = 8192  # default size; the head's largest product, and most texts use fewer distinct tokens


class HeadOptions(BaseModel):
    """What of a new head's shape may be chosen; all else is the target's. None leaves the target's own value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int | None = Field(default=None, gt=0, description="h, the head's width; None: the target's")
    intermediate_size: int | None = Field(default=None, gt=0, description="None: the target's, scaled with hidden_size")
    num_layers: int = Field(default=1, ge=1, le=MAX_HEAD_LAYERS, description="decoder layers; the published heads have one")
    fc_norm: bool = Field(default=False, description="EAGLE-3.1: norm each tap before the fusion")
    norm_output: bool = Field(default=False, description="EAGLE-3.1: hand the normed state on to the next step")
    qk_norm: bool = Field(default=False, description="norm queries and keys per attention head (Qwen3)")
    taps: tuple[int, int, int] | None = Field(default=None, description="tapped layers; None: 2, L//2 and L-3")


class TargetedConfig(BaseModel):
    """What every kind of head has: a width, the target's vocabulary, and a target it was made for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(gt=0, description="h, the head's width")
    vocab_size: int = Field(gt=0, description="V, the target's vocabulary")
    target_name: str = ""
    target_fingerprint: str = ""

    def taps(self, target: Target) -> tuple[int, ...]:
        """The taps of `target` that the head reads: the final, normed state."""
        return (target.num_layers,)

    def sizes(self, target: Target) -> dict[str, tuple[int, int]]:
        """(this head's, `target`'s) of every size that must be the same, by its name."""
        return {"hidden width": (self.hidden_size, target.hidden_size), "vocabulary": (self.vocab_size, target.vocab_size)}

    def check_target(self, target: Target) -> None:
        """Raise EyasError, in one line, when this head was not made for `target`."""
        for what, (head, model) in self.sizes(target).items():
            if head != model:
                raise EyasError(
                    f"this head was trained for another target ({self.target_name or 'unnamed'}): its {what} is {head}, "
                    f"that of '{target.name}' is {model}; give the target it was trained for, or train a head for this one"
                )
        if self.taps(target) != target.tap_ids:
            raise EyasError(
                f"this head reads taps {list(self.taps(target))}, the target '{target.name}' was loaded with "
                f"{list(target.tap_ids)}; load the target with taps={list(self.taps(target))}"
            )
        if self.target_fingerprint not in ("", target.fingerprint):
            console.print(
                f"note: this head was trained for {self.target_name} ({self.target_fingerprint}), not for "
                f"{target.name} ({target.fingerprint}); the text stays right, but fewer drafts may be accepted",
                style="yellow", markup=False,
            )  # fmt: skip


class MedusaConfig(TargetedConfig):
    """Shape of Medusa heads."""

    num_heads: int = Field(gt=0, description="how many tokens after the target's own next one are predicted")
    draft_vocab_size: int = Field(gt=0, description="D, the heads' own vocabulary")

    @model_validator(mode="after")
    def _vocabulary_is_part_of_the_targets(self) -> Self:
        _check_vocabulary(self.draft_vocab_size, self.vocab_size)
        return self


class LayerConfig(TargetedConfig):
    """A head with Llama-shaped decoder layers."""

    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, description="need not be hidden_size / num_attention_heads")
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope: dict[str, Any] = Field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = Field(gt=0)
    qk_norm: bool = Field(default=False, description="norm queries and keys per attention head (Qwen3)")
    qkv_bias: bool = Field(default=False, description="of the query, key and value projections")
    o_bias: bool = Field(default=False, description="of attention's output projection")
    mlp_bias: bool = Field(default=False, description="of the MLP's three projections")
    fc_bias: bool = Field(default=False, description="of the fusion")
    own_embedding: bool = Field(default=False, description="the head has an embedding [V, h] of its own")

    @model_validator(mode="after")
    def _layer_is_consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads evenly"
            )
        try:
            inverse_frequencies(self.rope, self.head_dim)
        except (EyasError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"rope {self.rope} cannot be used: {error}") from error
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, so rotary positions cannot be applied")
        return self

    @staticmethod
    def of_layers(target: Target) -> dict[str, Any]:
        """The fields that a head takes over from the layers of `target`, the widths left out."""
        config = target.config
        heads = config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        if not isinstance(rope.get("rope_theta"), int | float):  # one entry per layer kind: take that of full attention
            rope = dict(rope.get("full_attention") or {"rope_type": "default", "rope_theta": 10000.0})
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or target.hidden_size // heads,
            "vocab_size": target.vocab_size,
            "target_name": target.name,
            "target_fingerprint": target.fingerprint,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
            "rope": rope,
            "max_position_embeddings": target.max_length,
        }


class Eagle1Config(LayerConfig):
    """Shape of an EAGLE-1 head, which has its target's width."""

    @classmethod
    def for_target(cls, target: Target) -> Eagle1Config:
        """The head that fits `target`."""
        return cls(
            hidden_size=target.hidden_size, intermediate_size=target.config.intermediate_size, fc_bias=True,
            **cls.of_layers(target),
        )  # fmt: skip


class HeadConfig(LayerConfig):
    """Shape of an EAGLE-3 head. H = target width, h = head width, V and D = target and draft vocabulary.

    `tap_ids` follow one convention: tap i is Hugging Face's `hidden_states[i]`, the state ENTERING layer i.
    """

    target_hidden_size: int = Field(gt=0, description="H, the width of each tap")
    draft_vocab_size: int = Field(gt=0, description="D, the head's own vocabulary")
    tap_ids: tuple[int, int, int]
    target_layers: int = Field(gt=0, description="layers of the target the head was trained for")
    norm_before_residual: bool = Field(default=False, description="residual is the normed state (speculators' default)")
    num_layers: int = Field(default=1, ge=1, description="decoder layers; the published heads have one")
    fc_norm: bool = Field(default=False, description="EAGLE-3.1: norm each tap before the fusion")
    norm_output: bool = Field(default=False, description="EAGLE-3.1: hand the normed state on to the next step")

    @model_validator(mode="after")
    def _head_is_consistent(self) -> Self:
        if self.hidden_size != self.target_hidden_size and not self.own_embedding:
            raise ValueError(
                f"a head of width {self.hidden_size} cannot read the target's embedding of {self.target_hidden_size}; "
                "it needs one of its own (the tensor 'embed_tokens.weight')"
            )
        _check_vocabulary(self.draft_vocab_size, self.vocab_size)
        return self

    @classmethod
    def for_target(
        cls, target: Target, *, draft_vocab_size: int | None = None, options: HeadOptions | None = None
    ) -> HeadConfig:
        """The head that fits `target`: its width, heads, rope and position limit, and three taps, but for the `options`.

        Raises EyasError when the target was loaded with other taps than the options name.
        """
        options = options or HeadOptions()
        if len(target.tap_ids) != 3:
            raise EyasError(f"an EAGLE-3 head reads three taps, '{target.name}' was loaded with {list(target.tap_ids)}")
        if options.taps not in (None, target.tap_ids):
            raise EyasError(
                f"the head shall read taps {list(options.taps or ())}, the target '{target.name}' was loaded with "
                f"{list(target.tap_ids)}; load the target with taps={list(options.taps or ())}"
            )
        width = options.hidden_size or target.hidden_size
        scaled = -(-target.config.intermediate_size * width // target.hidden_size)  # rounded up
        return cls(
            hidden_size=width,
            target_hidden_size=target.hidden_size,
            intermediate_size=options.intermediate_size or scaled,
            draft_vocab_size=min(draft_vocab_size or DRAFT_VOCABULARY, target.vocab_size),
            tap_ids=target.tap_ids,  # type: ignore[arg-type]
            target_layers=target.num_layers,
            num_layers=options.num_layers,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            qk_norm=options.qk_norm,
            own_embedding=width != target.hidden_size,
            **cls.of_layers(target),
        )

    def taps(self, target: Target) -> tuple[int, ...]:
        return self.tap_ids

    def sizes(self, target: Target) -> dict[str, tuple[int, int]]:
        return {
            **super().sizes(target),
            "hidden width": (self.target_hidden_size, target.hidden_size),
            "number of layers": (self.target_layers, target.num_layers),
        }


def _check_vocabulary(draft: int, whole: int) -> None:
    if draft > whole:
        raise ValueError(f"draft vocabulary {draft} is larger than the target's {whole}")
