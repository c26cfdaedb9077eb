"""A model as its configuration describes it."""

from __future__ import annotations

from dataclasses import dataclass

from graphattn.planner.config import ConfigFile, read_config
from graphattn.planner.layers import Attention, Experts, GatedMLP, GroupedAttention, LatentAttention
from graphattn.planner.shard import Parameters, Shard

# model_type -> what its configuration leaves unsaid: (bias of q, k and v; norms of q and k).
GROUPED = {
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
LATENT = ("deepseek_v3", "kimi_k2")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Model:
    """Layers and how their parameters are stored."""

    name: str
    hidden: int
    vocab: int
    tied: bool  # embedding and head are one tensor
    attention: Attention
    dense: GatedMLP
    dense_layers: int
    experts: Experts | None
    expert_layers: int
    draft_modules: int  # MTP
    max_positions: int
    linear_bytes: float  # of a parameter of a linear layer, scales included
    other_bytes: int  # of any other, and of activations

    @property
    def layers(self) -> int:
        """Of the model, without MTP modules."""
        return self.dense_layers + self.expert_layers

    @property
    def quantized(self) -> bool:
        """The linear layers are FP8."""
        return self.linear_bytes < self.other_bytes

    def parameters(self, shard: Shard) -> Parameters:
        """Of the model on one GPU, without MTP modules."""
        body = self.dense.parameters(shard) * self.dense_layers
        if self.experts is not None:
            body += self.experts.parameters(shard) * self.expert_layers
        body += (self.attention.parameters(shard) + self.norms) * self.layers
        ends = self.head(shard) * (1 if self.tied else 2)
        return body + ends + Parameters(other=self.hidden)

    def draft_parameters(self, shard: Shard) -> Parameters:
        """Of one MTP module on one GPU; it shares embedding and head."""
        block = self.dense if self.experts is None else self.experts
        attention = self.attention.parameters(shard) + self.norms
        return block.parameters(shard) + attention + self.draft_entry

    def head(self, shard: Shard) -> Parameters:
        """The embedding or the head on one GPU."""
        return Parameters(other=self.vocab * self.hidden / shard.tp)

    @property
    def norms(self) -> Parameters:
        """Of one layer."""
        return Parameters(other=2 * self.hidden)

    @property
    def draft_entry(self) -> Parameters:
        """Projection and norms around the layer of an MTP module."""
        return Parameters(other=2 * self.hidden**2 + 3 * self.hidden)

    def weight_bytes(self, parameters: Parameters) -> float:
        """Of parameters as they are stored."""
        return parameters.linear * self.linear_bytes + parameters.other * self.other_bytes


def read_model(model: str) -> Model:
    """A model by its shipped name or folder; `ConfigError` when something in it is not counted."""
    config = read_config(model)
    kind = config.values.get("model_type")
    if kind not in GROUPED and kind not in LATENT:
        raise config.wrong("model_type", f"one of {', '.join([*GROUPED, *LATENT])}", kind)
    other = _dtype_bytes(config)
    dense, experts = _layer_counts(config)
    return Model(
        name=model,
        hidden=config.size("hidden_size"),
        vocab=config.size("vocab_size"),
        tied=config.flag("tie_word_embeddings"),
        attention=_grouped(config) if kind in GROUPED else _latent(config),
        dense=GatedMLP(config.size("hidden_size"), config.size("intermediate_size")),
        dense_layers=dense,
        experts=_experts(config) if experts else None,
        expert_layers=experts,
        draft_modules=config.count("num_nextn_predict_layers", "num_mtp_layers", default=0),
        max_positions=config.size("max_position_embeddings"),
        linear_bytes=_linear_bytes(config, other),
        other_bytes=other,
    )


def _grouped(config: ConfigFile) -> GroupedAttention:
    windows = config.values.get("sliding_window")
    kinds = set(config.values.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"} or (windows and config.flag("use_sliding_window", default=True)):
        raise config.wrong("sliding_window", "layers that see the whole context", windows)
    heads = config.size("num_attention_heads")
    qkv_bias, qk_norm = GROUPED[config.values["model_type"]]
    bias = config.flag("attention_bias")
    return GroupedAttention(
        hidden=config.size("hidden_size"),
        heads=heads,
        kv_heads=config.size("num_key_value_heads", default=heads),
        head_dim=config.size("head_dim", default=config.size("hidden_size") // heads),
        qkv_bias=qkv_bias or bias,
        out_bias=bias,
        qk_norm=qk_norm,
    )


def _latent(config: ConfigFile) -> LatentAttention:
    return LatentAttention(
        hidden=config.size("hidden_size"),
        heads=config.size("num_attention_heads"),
        q_rank=config.count("q_lora_rank", default=0),
        kv_rank=config.size("kv_lora_rank"),
        nope_dim=config.size("qk_nope_head_dim"),
        rope_dim=config.size("qk_rope_head_dim"),
        value_dim=config.size("v_head_dim"),
    )


def _layer_counts(config: ConfigFile) -> tuple[int, int]:
    """Layers with a dense feed-forward part, and with experts."""
    layers = config.size("num_hidden_layers")
    if config.values["model_type"] in LATENT:
        dense = min(config.count("first_k_dense_replace", default=0), layers)
    elif config.values["model_type"] == "qwen3_moe":
        step = config.size("decoder_sparse_step", default=1)
        sparse = [i for i in range(layers) if (i + 1) % step == 0]
        dense = layers - len(set(sparse) - set(config.values.get("mlp_only_layers") or ()))
    else:
        dense = 0 if config.values["model_type"] == "mixtral" else layers
    return dense, layers - dense


def _experts(config: ConfigFile) -> Experts:
    latent = config.values["model_type"] in LATENT
    intermediate = config.size("moe_intermediate_size", "intermediate_size")
    return Experts(
        hidden=config.size("hidden_size"),
        count=config.size("n_routed_experts", "num_experts", "num_local_experts"),
        per_token=config.size("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=intermediate * config.count("n_shared_experts", default=0),
        router_bias=latent,
    )


def _dtype_bytes(config: ConfigFile) -> int:
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise config.wrong("dtype", f"one of {', '.join(DTYPE_BYTES)}", dtype)
    return DTYPE_BYTES[dtype]


def _linear_bytes(config: ConfigFile, other: int) -> float:
    """One byte and its share of a block's scale, or no quantization at all."""
    quantization = config.values.get("quantization_config")
    if quantization is None:
        return other
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method != "fp8" or not block:
        raise config.wrong("quantization_config", "none, or fp8 in weight blocks", method)
    rows, columns = block
    return 1 + SCALE_BYTES / (int(rows) * int(columns))
