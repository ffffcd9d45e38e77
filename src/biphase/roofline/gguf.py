"""The architecture of a GGUF file, from its metadata and its tensor table."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from biphase.errors import BadInput
from biphase.roofline.architecture import Architecture
from biphase.roofline.config import from_config_with
from biphase.roofline.formats import GGML_FORMATS, Format
from biphase.roofline.gguf_file import Tensor, read_gguf

# general.architecture -> model_type; general.file_type -> the ggml type of most matrices (llama.h llama_ftype)
_FAMILIES = {
    "llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v3", "phi3": "phi3", "smollm3": "smollm3", "granite": "granite",
}  # fmt: skip
_FILE_TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 7: 8, 8: 6, 9: 7, 10: 10, 11: 11, 12: 11, 13: 11, 14: 12, 15: 12, 16: 13, 17: 13,
               18: 14, 25: 20, 30: 23, 32: 30, 38: 39}  # fmt: skip

# key below "<architecture>." -> field of a Hugging Face config
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "attention.value_length": "v_head_dim",
}
_ONLY_MLA = ("qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank", "first_k_dense_replace")

# module below "model.layers.N." -> tensor below "blk.N."
_MODULES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.experts.0.gate_proj": "ffn_gate_exps", "mlp.experts.0.up_proj": "ffn_up_exps",
    "mlp.experts.0.down_proj": "ffn_down_exps", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
# fused tensors of some families, tried when the separate one is missing
_FUSED = {
    "attn_q": "attn_qkv",
    "attn_k": "attn_qkv",
    "attn_v": "attn_qkv",
    "ffn_gate": "ffn_up",
    "attn_kv_b": "attn_k_b",
}


def from_gguf_file(path: Path, name: str = "") -> Architecture:
    """The architecture of a GGUF file, each matrix in the format of its tensor."""
    file = read_gguf(path)
    return from_gguf_metadata(file.metadata, name or path.stem, file.tensors)


def from_gguf_metadata(
    metadata: Mapping[str, Any], name: str = "", tensors: Mapping[str, Tensor] | None = None
) -> Architecture:
    """The architecture of the ``general.*`` and ``<architecture>.*`` keys of a GGUF.

    Without ``tensors`` every matrix takes the type that ``general.file_type`` names, and a note says so: a file mixes.
    """
    source = name or str(metadata.get("general.name", "the GGUF"))
    config = _config(metadata, source)
    if tensors is None:
        form = _most_common_format(metadata, source)
        found = from_config_with(config, source, lambda _: form)
        note = f"no tensor table: all matrices taken as {form.name}, as general.file_type says of most"
        return replace(found, notes=(*found.notes, note))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        config["vocab_size"] = embedding.shape[1]
    return _checked(from_config_with(config, source, _table_format(tensors, source)), tensors, source)


def _config(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise BadInput(f"{source}: general.architecture is {kind!r}; known GGUF architectures: {known}")
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if f"{kind}.{key}" not in metadata:
            raise BadInput(f"{source}: the GGUF key {kind}.{key} is missing; this is no file of a whole model")
    config = {field: metadata[f"{kind}.{key}"] for key, field in _KEYS.items() if f"{kind}.{key}" in metadata}
    family = _FAMILIES[kind]
    if family == "llama" and config.get("num_experts"):
        family, config["num_local_experts"] = "mixtral", config.pop("num_experts")
    elif family == "gpt_oss":
        config["num_local_experts"] = config.pop("num_experts", None)
    if family == "deepseek_v3":
        _latent_fields(config, metadata, kind)
    else:
        config = {field: value for field, value in config.items() if field not in _ONLY_MLA}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        config.setdefault("vocab_size", len(tokens))
    return {**config, "model_type": family}


def _latent_fields(config: dict[str, Any], metadata: Mapping[str, Any], kind: str) -> None:
    """DeepSeek in GGUF: key and value lengths of the expanded heads, under two spellings of two generations."""
    key = metadata.get(f"{kind}.attention.key_length_mla", config.pop("head_dim", None))
    value = metadata.get(f"{kind}.attention.value_length_mla", config.get("v_head_dim"))
    rope = config.get("qk_rope_head_dim")
    config["qk_nope_head_dim"] = key - rope if isinstance(key, int) and isinstance(rope, int) else None
    config["v_head_dim"] = value
    config.pop("head_dim", None)
    config["n_routed_experts"] = config.pop("num_experts", 0)
    if metadata.get(f"{kind}.expert_gating_func") == 2:  # sigmoid, with the bias of DeepSeek-V3
        config["topk_method"] = "noaux_tc"


def _most_common_format(metadata: Mapping[str, Any], source: str) -> Format:
    kind = metadata.get("general.file_type")
    if not isinstance(kind, int) or kind not in _FILE_TYPES:
        raise BadInput(f"{source}: general.file_type {kind!r} is not known, and there is no tensor table")
    return GGML_FORMATS[_FILE_TYPES[kind]]


def _table_format(tensors: Mapping[str, Tensor], source: str) -> Callable[[str], Format]:
    def form(path: str) -> Format:
        name = _tensor_name(path)
        for candidate in (name, _fused(name)):
            if candidate in tensors:
                return tensors[candidate].form
        raise BadInput(f"{source}: the tensor {name!r} is missing from the file")

    return form


def _tensor_name(path: str) -> str:
    if path == "model.embed_tokens":
        return "token_embd.weight"
    if path == "lm_head":
        return "output.weight"
    _, _, layer, module = path.split(".", 3)
    return f"blk.{layer}.{_MODULES.get(module, module)}.weight"


def _fused(name: str) -> str:
    head, layer, tensor, tail = name.split(".") if name.count(".") == 3 else ("", "", name, "")
    return ".".join((head, layer, _FUSED.get(tensor, tensor), tail))


def _checked(found: Architecture, tensors: Mapping[str, Tensor], source: str) -> Architecture:
    """The architecture with the 4-byte vectors of GGUF; a note when the table holds what the metadata does not name."""
    layers = tuple(replace(layer, vector_width=4) for layer in found.layers)
    exact = replace(found, layers=layers, vector_width=4)
    counted = [tensor for tensor in tensors.values() if not tensor.name.startswith("rope_")]
    listed, stored = sum(t.elements for t in counted), sum(t.stored_bytes for t in counted)
    if (listed, stored) == (exact.parameters, exact.weight_bytes):
        return exact
    note = (
        f"the tensor table holds {listed:,} parameters in {stored:,} bytes, "
        f"the metadata describes {exact.parameters:,} in {exact.weight_bytes:,}"
    )
    return replace(exact, notes=(*exact.notes, note))
