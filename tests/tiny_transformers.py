"""Tiny random models of the classes in the installed transformers, and inputs for them."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import torch
import transformers.models
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

VOCABULARY, BATCH, LENGTH = 64, 2, 6
LARGEST = 6_000_000  # parameters and buffers of a model that counts as tiny

# Names of a configuration's attributes by the size that they get.
NAMES = {
    VOCABULARY: "vocab_size",
    128: "max_position_embeddings n_positions n_ctx",
    32: "hidden_size d_model n_embd embed_dim dim hidden_dim encoder_hidden_dim embedding_size word_embed_proj_dim emb_dim "
    "projection_dim out_hidden_size text_embed_dim vision_embed_dim encoder_hidden_size decoder_hidden_size lm_hidden_size "
    "embedding_dim intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner moe_intermediate_size mlp_dim "
    "decoder_intermediate_size encoder_intermediate_size shared_expert_intermediate_size intermediate_dim output_dim "
    "shared_intermediate_size text_hidden_size cross_hidden_size max_source_positions max_target_positions",
    16: "q_lora_rank kv_lora_rank num_queries num_mel_bins image_size",
    8: "head_dim d_kv kv_channels attention_head_dim linear_key_head_dim linear_value_head_dim v_head_dim qk_nope_head_dim "
    "qk_rope_head_dim global_head_dim cross_head_dim",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads n_routed_experts "
    "encoder_num_attention_heads decoder_num_attention_heads linear_num_key_heads linear_num_value_heads num_experts "
    "num_decoder_attention_heads num_local_experts moe_num_experts cross_num_attention_heads cross_num_key_value_heads "
    "sliding_window attention_window local_attention attention_chunk_size patch_size num_filters",
    2: "num_key_value_heads encoder_num_key_value_heads decoder_num_key_value_heads num_experts_per_tok n_shared_experts "
    "moe_k moe_topk spatial_merge_size num_hidden_layers num_layers n_layer n_layers depth encoder_layers decoder_layers "
    "num_decoder_layers num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers decoder_num_layers "
    "encoder_num_layers",
    1: "n_group topk_group first_k_dense_replace num_expert_group",
}
MROPE = re.compile("Glm46V|Glm4v(?!Moe)|GlmImage|GlmOcr|Qwen2VL|Qwen2_5_VL|Qwen2_5Omni|PaddleOCR")  # sections not in defaults
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
ADJUSTED = {  # what the rule above gets wrong, by the configuration's class
    "AutoformerConfig": {"prediction_length": 2, "context_length": 4},
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5}},
    "EsmConfig": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2},
    "EsmcConfig": {"num_key_value_heads": 4},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "GraniteSpeech5EncoderConfig": {"context_size": 16},
    "InformerConfig": {"prediction_length": 2, "context_length": 4},
    "LukeConfig": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "MarkupLMConfig": {"max_xpath_tag_unit_embeddings": 20, "max_xpath_subs_unit_embeddings": 20, "tag_pad_id": 19,
                       "subs_pad_id": 19},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16},
    "NystromformerConfig": {"num_landmarks": 2},
    "PerceiverConfig": {"num_latents": 4, "d_latents": 32},
    "ReformerConfig": {"axial_pos_embds": False},
    "RoCBertConfig": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "Nemotron3_5TranscribeAudioConfig": {"num_key_value_heads": 4},
    "Nemotron3_5TranscribeAsrAudioConfig": {"num_key_value_heads": 4},
    "Nemotron3_5TranscribeWordTimestampConfig": {"num_key_value_heads": 4},
    "Swinv2Config": {"image_size": 32, "window_size": 2},
    "TimeSeriesTransformerConfig": {"prediction_length": 2, "context_length": 4},
    "XLMConfig": {"n_words": VOCABULARY},
    "FlaubertConfig": {"n_words": VOCABULARY},
    "FalconH1Config": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "FSMTConfig": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "VibeVoiceAcousticTokenizerConfig": {"downsampling_ratios": (2, 2), "depths": (1, 1, 1), "num_filters": 4},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"downsampling_ratios": (2, 2), "depths": (1, 1, 1), "num_filters": 4},
    "VibeVoiceAcousticTokenizerDecoderConfig": {"downsampling_ratios": (2, 2), "depths": (1, 1, 1), "num_filters": 4},
    "ZayaConfig": {"num_experts_per_tok": 1},
}  # fmt: skip


def families() -> list[str]:
    """Returns the names of transformers' folders of models."""
    return sorted(package.name for package in pkgutil.iter_modules(transformers.models.__path__) if package.ispkg)


def model_classes(family: str) -> list[type[PreTrainedModel]]:
    """Returns one class per configuration of a family, the model without a head if there is one, because heads have no
    attention."""
    package = importlib.import_module(f"transformers.models.{family}")
    found = {}
    for file in pkgutil.iter_modules(package.__path__):
        if not file.name.startswith("modeling_"):
            continue
        try:
            module = importlib.import_module(f"{package.__name__}.{file.name}")
        except ImportError:  # needs a package that is not installed here
            continue
        for name, kind in vars(module).items():
            if (
                inspect.isclass(kind)
                and issubclass(kind, PreTrainedModel)
                and kind.__module__ == module.__name__
                and not name.endswith("PreTrainedModel")
                and kind.config_class
                and kind.forward is not torch.nn.Module.forward
            ):
                chosen = found.setdefault(kind.config_class, kind)
                if name.endswith("Model") and not chosen.__name__.endswith("Model"):
                    found[kind.config_class] = kind
    return list(found.values())


def tiny_config(kind: type[PreTrainedConfig], default: PreTrainedConfig | None = None) -> PreTrainedConfig:
    default = kind() if default is None else default
    changes = {}
    for name in vars(default):
        value = getattr(default, name, None)
        if isinstance(value, PreTrainedConfig):
            changes[name] = tiny_config(type(value), value)
        elif (name in SIZES and type(value) is int) or (name == "head_dim" and value is None):
            changes[name] = SIZES[name]
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            changes[name] = 1
        elif name in ("layer_types", "mlp_layer_types") and value:
            changes[name] = (list(dict.fromkeys(value)) * 2)[:2]
        elif name in ("num_heads", "num_attention_heads", "image_size") and isinstance(value, (list, tuple)):
            changes[name] = type(value)([SIZES[name]] * len(value))
        elif name == "depths" and value:
            changes[name] = type(value)([1] * len(value))
        elif name == "rope_parameters" and isinstance(value, dict) and ("mrope_section" in value or MROPE.match(kind.__name__)):
            changes[name] = value | {"mrope_section": [2, 1, 1]}
        elif "drop" in name and isinstance(value, float):
            changes[name] = 0.0
    config = kind(**changes | ADJUSTED.get(kind.__name__, {}))
    config._experts_implementation = "eager"  # the other one has no float64
    return config


def tiny_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model in float64 and eval mode, with weights large enough that masks and scales matter.

    Raises:
        MemoryError: it is not tiny.
    """
    with no_init_weights():
        model = kind(config)
    size = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if size > LARGEST:
        raise MemoryError(f"{size / 1e6:.0f} million parameters")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() < 2 and name.endswith("weight"):  # of a normalisation
                parameter.add_(1.0)
    return model.double().eval()


def inputs(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yields arguments to try until the model's forward accepts them. They have two rows of tokens that differ only in the last
    one."""
    config = model.config

    def ids() -> Tensor:
        row = torch.randint(5, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1)).repeat(BATCH, 1)
        row[1, -1] = 4
        return row

    def size(name: str, default: int) -> int:
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int):
                return value
        return default

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    image = (BATCH, size("num_channels", 3), size("image_size", 16), size("image_size", 16))
    hidden = (BATCH, LENGTH, size("hidden_size", 32))
    patches = size("temporal_patch_size", 1) * size("in_channels", 3) * size("patch_size", 4) ** 2
    makers = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "pixel_values": lambda: noise(*image),
        "pixel_values_videos": lambda: noise(BATCH, size("num_frames", 2), *image[1:]),
        "input_values": lambda: noise(BATCH, 400),
        "input_features": lambda: noise(BATCH, size("num_mel_bins", 16), 2 * size("max_source_positions", 32)),
        "hidden_states": lambda: noise(*hidden),
        "inputs_embeds": lambda: noise(*hidden),
        "encoder_hidden_states": lambda: noise(*hidden),
        "query_embeds": lambda: noise(*hidden),
        "bbox": lambda: torch.zeros(BATCH, LENGTH, 4, dtype=torch.long),
        "past_values": lambda: noise(BATCH, size("context_length", 32), size("num_input_channels", 1)),
        "grid_thw": lambda: torch.tensor([[1, 4, 4]] * BATCH),
    }
    parameters = inspect.signature(model.forward).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty and name in makers]
    optional = [name for name in (model.main_input_name, "input_ids") if name in parameters and name in makers]
    decoder = [name for name in ("decoder_input_ids",) if name in parameters]
    tried = [
        {*needed, *(["input_ids"] if "input_ids" in optional else optional), *decoder},
        {*needed, *optional, *decoder, *(["pixel_values"] if "pixel_values" in parameters else [])},
        {*needed, *optional},
        {*needed, *decoder, *(["input_features"] if "input_features" in parameters else [])},
    ]
    for number, names in enumerate(tried):
        if names and names not in tried[:number]:
            yield {name: makers[name]() for name in names}
    if "grid_thw" in needed:
        yield {"hidden_states": noise(2 * 16, patches), "grid_thw": makers["grid_thw"]()}
        yield {"pixel_values": noise(2 * 16, patches), "grid_thw": makers["grid_thw"]()}
    if "input_features" in needed:
        yield {"input_features": noise(BATCH, 32, size("num_mel_bins", 16))}
