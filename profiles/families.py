"""What a CUDA graph cannot hold in the stock decode step of transformers, family by family.

    python -m profiles.families

Each family is a tiny random model. Its step is one call of the model for one new token per
sequence, over a `StaticCache` that a prompt has filled beyond every sliding window; model, cache
and step lie on a fake CUDA device. Prints the table of `docs/families.md`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import graphattn
from graphattn._capture.audit import fake_cuda

if TYPE_CHECKING:
    from graphattn._capture.audit import AuditReport

WINDOW, PROMPT, LONGEST = 8, 9, 32  # tokens
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

# name -> (model type, options beyond the sizes)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, dynamic rope": ("llama", {"rope_parameters": _DYNAMIC_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, **_EXPERTS}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("gemma2", _ALTERNATING),
    "gemma3": ("gemma3_text", _ALTERNATING),
    "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {"rope_parameters": _LONGROPE}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            **_ALTERNATING,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **_EXPERTS,
            **_LATENT,
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "cohere2": ("cohere2", _ALTERNATING),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "falcon_h1": ("falcon_h1", {}),
    "bloom": ("bloom", {}),
    "opt": ("opt", {}),
}


def audited(family: str) -> AuditReport:
    """Audit of the family's decode step."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    model_type, options = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **_SIZES | options)
    with fake_cuda():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        cache = StaticCache(config=config, max_cache_len=LONGEST)
        prompt, token = (torch.ones(2, n, dtype=torch.int64) for n in (PROMPT, 1))
        positions = torch.full((2, 1), PROMPT)

        def step() -> Any:
            return model(input_ids=token, position_ids=positions, cache=cache, use_cache=True)

        # Under an audit too, since a prompt may read the host; it runs twice and fits twice.
        graphattn.audit(lambda: model(input_ids=prompt, cache=cache, use_cache=True))
        return graphattn.audit(step)


def rows(family: str, report: AuditReport) -> Iterator[str]:
    """Lines of the table: one of each finding, one of a family without."""
    head = f"| {family} | {report.num_ops} |"
    if report.ok:
        yield f"{head} none | |"
    for finding in report.findings:
        file = finding.file.rpartition(f"transformers{os.sep}")[2]
        yield f"{head} {finding.category} | `{file}:{finding.line}` `{finding.source}` |"


def table() -> Iterator[str]:
    """The whole table, in Markdown."""
    yield "| family | operations | finding | where in transformers |"
    yield "| --- | --- | --- | --- |"
    for family in FAMILIES:
        yield from rows(family, audited(family))


def main() -> None:
    """Print the table."""
    for line in table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
