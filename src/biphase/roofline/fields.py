"""Reads the fields of a model config with checks: a missing, ill-typed or unknown field is an error that names it."""

from collections.abc import Iterable, Mapping
from typing import Any

from biphase.errors import BadInput

LARGEST = 2**40  # no dimension of a model comes near; a larger number is a corrupt file

# Fields that change neither a shape nor a byte, and are read by nobody here.
_NO_SHAPE = {
    "architectures", "attn_implementation", "auto_map", "transformers_version", "use_cache", "torch_dtype", "dtype",
    "model_type", "hidden_act", "hidden_activation", "mlp_hidden_act", "mamba_hidden_act", "pretraining_tp", "ep_size",
    "output_attentions", "output_hidden_states", "return_dict", "problem_type", "id2label", "label2id", "torchscript",
    "is_encoder_decoder", "is_decoder", "chunk_size_feed_forward", "finetuning_task", "task_specific_params",
    "max_length", "min_length", "initial_context_length", "original_max_position_embeddings", "partial_rotary_factor",
    "rotary_pct", "rotary_emb_base", "max_window_layers", "logits_soft_cap", "final_logit_softcapping",
    "attn_logit_softcapping", "query_pre_attn_scalar", "attn_scale", "floor_scale", "attn_temperature_tuning",
    "swiglu_limit", "norm_topk_prob", "topk_method", "scoring_func", "routed_scaling_factor", "n_group", "topk_group",
    "seq_aux", "num_logits_to_keep", "mtp_use_dedicated_embeddings", "chunk_size", "residual_in_fp32",
    "rescale_prenorm_residual", "use_mamba_kernels", "use_bidirectional_attention", "embedding_multiplier",
    "attention_multiplier", "residual_multiplier", "logits_scaling", "layer_norm_epsilon", "norm_eps", "rms_norm_eps",
    "layer_norm_eps", "cache_implementation", "pruned_heads", "image_size", "vocab_size_per_layer_input",
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "router_jitter_noise", "output_router_logits",
    "attention_probs_dropout_prob", "unsloth_fixed", "unsloth_version", "tokenizer_class", "prefix", "bad_words_ids",
    "experts_per_token", "model_max_length", "rope_interleaved", "no_rope_layers", "no_rope_layer_interval",
    "mamba_ssm_dtype", "compression_config", "expand", "mamba_chunk_size", "time_step_limit",
    "quantization_config", "use_sliding_window", "eos_token_ids",
}  # fmt: skip
_NO_SHAPE_ENDINGS = ("_token_id", "_token_index", "_dropout", "_pdrop", "_loss_coef", "_loss_alpha", "_version")
_NO_SHAPE_STARTS = ("_", "rope_", "initializer_", "time_step_", "vision_", "audio_", "aux_loss")


class Fields:
    """A config being read: each getter marks its field; :meth:`refuse_unread` names one that nobody understood."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        """``source`` names the config in messages."""
        self._values = values
        self._read: set[str] = set()
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it stands, or None; marks the field as read."""
        self._read.add(name)
        return self._values.get(name)

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``; required without a default."""
        value = self.raw(name)
        if value is None:
            if default is None:
                raise BadInput(f"{self.source}: the field {name!r} is missing; a model of this family needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadInput(f"{self.source}: {name} must be a whole number, found {_shown(value)}")
        if not least <= value <= LARGEST:
            raise BadInput(f"{self.source}: {name} must be between {least} and 2^40, found {value}")
        return value

    def first_count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of several spellings of one field."""
        for name in names:
            if name in self:
                return self.count(name, least=least)
        return self.count(names[0], default, least=least)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadInput(f"{self.source}: {name} must be true or false, found {_shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string; required without a default."""
        value = self.raw(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise BadInput(f"{self.source}: {name} must be a string, found {_shown(value)}")
        return value

    def list_of(self, name: str, kinds: Iterable[str] | None = None) -> list[Any] | None:
        """A list, or None when the field is absent; ``kinds`` are the strings it may hold."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise BadInput(f"{self.source}: {name} must be a list, found {_shown(value)}")
        allowed = sorted(kinds or ())
        for item in value:
            if allowed and item not in allowed:
                raise BadInput(f"{self.source}: {name} holds {_shown(item)}; known: {', '.join(allowed)}")
        return value

    def nested(self, name: str) -> "Fields":
        """The fields of an inner config."""
        value = self.raw(name)
        if not isinstance(value, dict):
            raise BadInput(f"{self.source}: {name} must be an object, found {_shown(value)}")
        return Fields(value, f"{self.source}: {name}")

    def refuse(self, name: str, reason: str) -> None:
        """BadInput when the field is switched on."""
        value = self.raw(name)
        if value not in (None, False, 0, [], {}):
            raise BadInput(f"{self.source}: {name} = {_shown(value)} is not supported: {reason}")

    def refuse_unread(self) -> None:
        """BadInput naming a field that no reader understood and that is switched on."""
        for name, value in self._values.items():
            if name in self._read or _harmless(name) or value in (None, False, 0, "", [], {}):
                continue
            raise BadInput(
                f"{self.source}: the field {name!r} = {_shown(value)} is not understood and may change the shapes; "
                "if it has no bearing on them, remove it from the config"
            )


def _harmless(name: str) -> bool:
    return name in _NO_SHAPE or name.endswith(_NO_SHAPE_ENDINGS) or name.startswith(_NO_SHAPE_STARTS)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
