"""Tiny random models of every class in the installed transformers, and inputs for them."""

import importlib
import inspect
import pkgutil

import torch
import transformers
import transformers.models
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY, BATCH, LENGTH, LAYERS = 64, 2, 6, 2

# Sizes by the name of a configuration's attribute; those of lists are by their length.
SIZES = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "encoder_hidden_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "projection_dim", "hidden_sizes_", "out_hidden_size"), 32),
    **dict.fromkeys(("text_embed_dim", "vision_embed_dim", "encoder_hidden_size", "decoder_hidden_size", "lm_hidden_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers"), LAYERS),
    **dict.fromkeys(("decoder_num_hidden_layers", "decoder_num_layers", "encoder_num_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "n_inner"), 32),
    **dict.fromkeys(("moe_intermediate_size", "decoder_intermediate_size", "encoder_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "mlp_dim", "intermediate_dim", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_shared_experts", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_expert_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 32),
    **dict.fromkeys(("num_queries", "num_mel_bins"), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention", "attention_chunk_size"), 4),
    "patch_size": 4,
    "image_size": 16,
}
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id")


def model_classes() -> list[type[PreTrainedModel]]:
    """The classes with a forward in all modeling files that can be imported."""
    found = []
    for model in sorted(package.name for package in pkgutil.iter_modules(transformers.models.__path__)):
        package = importlib.import_module(f"transformers.models.{model}")
        for file in pkgutil.iter_modules(package.__path__):
            if not file.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"{package.__name__}.{file.name}")
            except ImportError:  # a package that is not installed here
                continue
            for name, kind in vars(module).items():
                if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__:
                    if (
                        not name.endswith("PreTrainedModel")
                        and kind.config_class
                        and kind.forward is not torch.nn.Module.forward
                    ):
                        found.append(kind)
    return found


def tiny_config(kind: type[PreTrainedConfig], default: PreTrainedConfig | None = None) -> PreTrainedConfig:
    default = kind() if default is None else default
    changes = {}
    for name in vars(default):
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            changes[name] = tiny_config(type(value), value)
        elif isinstance(value, dict) and name in kind.sub_configs:
            pass
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            changes[name] = SIZES[name]
        elif name in SPECIAL_TOKENS and isinstance(value, int) and value >= VOCABULARY:
            changes[name] = 1
        elif name in ("layer_types", "mlp_layer_types") and value:
            kinds = list(dict.fromkeys(value))
            changes[name] = (kinds * LAYERS)[:LAYERS]
        elif "drop" in name and isinstance(value, float):
            changes[name] = 0.0
    return kind(**changes)
