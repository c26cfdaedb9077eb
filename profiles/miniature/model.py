"""The miniature as transformers models: configuration, tokenizer, and the checkpoint on disk.

The layout is that of DeepSeek's checkpoints: every expert apart, the MTP module as the layer after
the last. Weights are stored as bf16 and computed as fp32, which `config.json` asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_layers import MtpModel

from profiles.miniature.text import END

CHECKPOINT = Path(__file__).parent / "checkpoint"
LAYERS = 3


def config() -> DeepseekV3Config:
    """DeepSeek-V3 in all its parts, at a thousandth of each size."""
    return DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        dtype="float32",
        vocab_size=264,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
        num_mtp_layers=1,
        initializer_range=0.04,
    )


def load(folder: Path = CHECKPOINT) -> Any:
    """The main model, fp32, in inference mode, ready for `load_mtp` and `generate(use_mtp=True)`.

    transformers 5.24 knows the MTP weights of a DeepSeek-V3 by one layer number, 61, that of the
    published model; here it is told the number of this one.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]
    return model.eval()


def load_mtp(model: Any) -> Any:
    """The MTP module of a model from `load`, as transformers' `MtpModel`."""
    return MtpModel.from_pretrained(model).eval()


def save(model: DeepseekV3ForCausalLM, mtp: MtpModel, folder: Path) -> None:
    """Write both, and the tokenizer, as one ordinary transformers folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(model, mtp)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as they are: the id of a byte is its value, and `END` ends a text."""
    alphabet = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def _tensors(model: DeepseekV3ForCausalLM, mtp: MtpModel) -> dict[str, Tensor]:
    """All weights under their names in the file; the router's bias stays fp32, as published."""
    last = f"model.layers.{LAYERS}."
    tensors = dict(model.state_dict())
    tensors[f"{last}embed_tokens.weight"] = model.model.embed_tokens.weight
    tensors[f"{last}shared_head.head.weight"] = model.lm_head.weight
    for name, weight in mtp.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors[last + name] = weight
    apart = (each for item in tensors.items() for each in _experts_apart(*item))
    return {
        name: weight.clone() if name.endswith("bias") else weight.to(torch.bfloat16)
        for name, weight in apart
    }


def _experts_apart(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """[experts, 2 * width, hidden] or [experts, hidden, width] -> one matrix per expert and name;
    any other weight as it is."""
    prefix, found, kind = name.partition(".experts.")
    if not found:
        yield name, weight
        return
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for i, expert in enumerate(weight):
        for part, matrix in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{prefix}.experts.{i}.{part}.weight", matrix.contiguous()
