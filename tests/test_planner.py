"""The planner: counted against transformers and by hand, and predictions against a measurement."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from graphattn.cli import main
from graphattn.models.contract import AttentionLayer
from graphattn.pages import page_bytes
from graphattn.planner.capacity import Load, capacity
from graphattn.planner.config import SHIPPED
from graphattn.planner.constants import CONSTANTS, MEMORY_SHARE, RESERVE
from graphattn.planner.gpu import GPUS, find_gpu
from graphattn.planner.model import Model, read_model
from graphattn.planner.prediction import Prediction, Question, predict
from graphattn.planner.shard import Shard
from graphattn.planner.work import Step, step_work

# vllm-project/vllm pull request 25049: output tokens/s by (dcp, mtp).
MEASURED = {
    (1, 0): 2332.43,
    (1, 1): 3038.71,
    (4, 0): 2983.08,
    (8, 0): 3502.24,
    (4, 1): 3722.81,
    (8, 1): 3600.58,
}
R1 = "plan --model deepseek-r1 --gpus 8 --gpu h200 --tp 8 --dcp 1,2,4,8 --mtp 0,1,2"
LOAD = Load(context=2048, output=1024, max_batch=1024, kv_bytes=2)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
SMALL = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied-with-bias": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=24, num_experts=6, mlp_only_layers=[1]
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    "deepseek": DeepseekV3Config(
        **SIZES | EXPERTS | LATENT, n_routed_experts=6, n_shared_experts=2, first_k_dense_replace=1
    ),
    "deepseek-full-query": DeepseekV3Config(
        **SIZES | EXPERTS | LATENT | {"q_lora_rank": None}, n_routed_experts=6, n_shared_experts=1
    ),
}


def question(model: str = "deepseek-r1", gpu: str = "h200", **changes: object) -> Question:
    asked = Question(read_model(model), GPUS[gpu], 8, (8,), (1,), (0,), LOAD, acceptance=0.81)
    return replace(asked, **changes)


def one(**changes: object) -> Prediction:
    (prediction,) = predict(question(**changes))
    return prediction


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[PretrainedConfig, Model]:
    config = SMALL[request.param]
    config.save_pretrained(tmp_path)
    return config, read_model(str(tmp_path))


@pytest.mark.parametrize("small", SMALL, indirect=True)
def test_parameters_are_those_that_transformers_makes(
    small: tuple[PretrainedConfig, Model],
) -> None:
    config, model = small
    with torch.device("meta"):
        made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    own = dict(made.named_parameters()) | {  # the router's bias is a buffer
        n: b for n, b in made.named_buffers() if n.endswith("e_score_correction_bias")
    }
    assert model.parameters(Shard()).total == sum(p.numel() for p in own.values())


def test_deepseek_has_its_published_sizes() -> None:
    """DeepSeek's README_WEIGHTS: 671B, and 11.5B of the MTP module alone."""
    model = read_model("deepseek-r1")
    assert model.parameters(Shard()).total == pytest.approx(671e9, rel=1e-3)
    assert model.draft_parameters(Shard()).total == pytest.approx(11.5e9, rel=1e-2)
    assert model.linear_bytes == 1 + 4 / 128**2


@pytest.mark.parametrize(
    ("small", "shard", "by_hand"),
    [
        # 2 bytes x 3 layers x K and V x KV heads of this GPU x 16
        pytest.param("llama", Shard(), 2 * 3 * 2 * 2 * 16, id="gqa"),
        pytest.param("llama", Shard(tp=2), 2 * 3 * 2 * 1 * 16, id="gqa-tp2"),
        pytest.param("llama", Shard(tp=4), 2 * 3 * 2 * 1 * 16, id="gqa-tp4-duplicated"),
        pytest.param("llama", Shard(tp=4, dcp=4), 2 * 3 * 2 * 2 * 16, id="gqa-tp4-dcp4"),
        # 2 bytes x 3 layers x (32 + 8), on every GPU of the group
        pytest.param("deepseek", Shard(tp=4, dcp=2), 2 * 3 * 40, id="mla"),
    ],
    indirect=["small"],
)
def test_kv_bytes_of_a_token_by_hand(
    small: tuple[PretrainedConfig, Model], shard: Shard, by_hand: int
) -> None:
    room = capacity(small[1], GPUS["a100"], shard, 0, replace(LOAD, context=40, output=20))
    assert room.token_bytes == by_hand


def test_weights_and_capacity_by_hand(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    # Of a layer on each of 2 GPUs: q and o 32 of 64 rows, k and v one head of 16, MLP 40 of 80.
    layer = 64 * 32 * 2 + 2 * 64 * 16 + 3 * 64 * 40 + 2 * 64
    weights = 2 * (3 * layer + 2 * 48 * 64 + 64)
    token = 3 * 2 * 16 * 2
    free = 12 * 64 * token + 1  # a dozen pages
    gpu = replace(GPUS["a100"], memory=(weights + RESERVE.value + free) / MEMORY_SHARE.value)
    load = replace(LOAD, context=100, output=60)  # 130 tokens on average, 160 in the end: 3 pages
    room = capacity(model, gpu, Shard(tp=2), 0, load)
    assert (room.weight_bytes, room.kv_tokens, room.batch) == (weights, 12 * 64, 4)
    assert room.limited


def test_kv_bytes_are_those_of_the_runtime() -> None:
    layers = [AttentionLayer(128, 1, 576, scale=1.0, value_dim=512)] * 61
    room = one().capacity
    assert room.token_bytes * 64 == page_bytes(layers, 64, torch.bfloat16)


def test_work_of_a_step_by_hand(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, dtype="bfloat16").save_pretrained(tmp_path)
    model = read_model(str(tmp_path))
    step = Step(rows=5, places=10, prompt=7)
    load = replace(LOAD, context=100, output=60)
    work = step_work(model, Shard(tp=2, dcp=2), 0, load, step)
    # Both KV heads on each GPU, half of the 130 positions.
    assert work.kv_bytes == 3 * 5 * 65 * (2 * 2 * 16) * 2
    assert work.decode_operations == 3 * 10 * 65 * 4 * (16 + 16) * 2
    assert work.prompt_operations == 3 * 7 * 50 * 2 * (16 + 16) * 2
    linear = 64 * 32 * 2 + 2 * 64 * 32 + 3 * 64 * 40
    assert work.linear_operations == 3 * 17 * linear * 2
    assert work.messages == 3 * (2 + 3) + 1
    reduced = 2 * 17 * 64 * 2  # twice half of 17 x 64 values of 2 bytes, twice a layer
    combined = 10 * 4 * (16 + 16) * 2 / 2 + 10 * 4 * 4
    logits = 10 * 96 * 2 / 2
    assert work.sent_bytes == 3 * (reduced + combined) + logits


def test_experts_touched_are_none_one_draw_and_all() -> None:
    experts = read_model("deepseek-r1").experts
    assert experts is not None
    assert experts.touched(0) == 0
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(2) == pytest.approx(8 + 8 * (1 - 8 / 256))
    assert experts.touched(4096) == pytest.approx(256)


def test_the_measurement_is_met() -> None:
    """Order and ratios of vLLM's table; the absolute numbers too, since three constants are its."""
    asked = question(dcp=(1, 4, 8), mtp=(0, 1))
    found = {(p.shard.dcp, p.mtp): p.output_tokens_per_s for p in predict(asked)}
    slow, middle = found[1, 0], (found[1, 1], found[4, 0])
    fast = (found[8, 0], found[4, 1], found[8, 1])
    assert slow < min(middle)
    assert max(middle) < min(fast)
    for key, tokens in MEASURED.items():
        assert found[key] / slow == pytest.approx(tokens / MEASURED[1, 0], rel=0.2)
        assert found[key] == pytest.approx(tokens, rel=0.1)


def test_the_table_in_the_docs_is_what_is_predicted() -> None:
    text = (Path(__file__).parents[1] / "docs" / "planner.md").read_text()
    for p in predict(question(dcp=(1, 4, 8), mtp=(0, 1))):
        measured = MEASURED[p.shard.dcp, p.mtp]
        row = f"| {p.shard.dcp} | {p.mtp} | {measured:.0f} | {p.output_tokens_per_s:.0f} |"
        assert row in text
    for constant in CONSTANTS:
        assert f"| `{constant.name}` | {constant.value:g} {constant.unit} |" in text


@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["deepseek-r1", "llama-3-70b"])
def test_more_hardware_never_harms(model: str, dcp: int) -> None:
    asked = question(model=model, dcp=(dcp,))
    (base,) = predict(asked)
    for figure in ("memory", "bandwidth", "bf16", "fp8", "link"):
        gpu = replace(asked.gpu, **{figure: getattr(asked.gpu, figure) * 1.5})
        (better,) = predict(replace(asked, gpu=gpu))
        assert better.output_tokens_per_s >= base.output_tokens_per_s, figure
        assert better.capacity.kv_tokens >= base.capacity.kv_tokens


def test_capacity_grows_with_dcp_and_falls_with_drafts() -> None:
    tokens = [one(dcp=(w,)).capacity.kv_tokens for w in (1, 2, 4, 8)]
    assert tokens == [tokens[0] * w for w in (1, 2, 4, 8)]
    assert one(mtp=(1,)).capacity.kv_tokens < tokens[0]
    half = one(load=replace(LOAD, kv_bytes=1)).capacity.kv_tokens
    assert half == pytest.approx(2 * tokens[0], rel=1e-3)


def test_longer_outputs_and_prompts_cost() -> None:
    base = one()
    longer = one(load=replace(LOAD, context=4096))
    assert longer.capacity.batch < base.capacity.batch
    assert longer.output_tokens_per_s < base.output_tokens_per_s
    # Without drafts that are accepted a draft only costs.
    assert one(mtp=(1,), acceptance=0.0).output_tokens_per_s < base.output_tokens_per_s
    assert one(mtp=(1,), acceptance=0.9).output_tokens_per_s > one(mtp=(1,)).output_tokens_per_s


def test_groups_share_nothing() -> None:
    twice = one(gpus=16)
    assert twice.output_tokens_per_s == pytest.approx(2 * one().output_tokens_per_s)
    assert twice.capacity == one().capacity


def test_command_prints_a_table_or_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*R1.split(), "--context", "2048", "--output", "1024"]
    assert main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in shown if line.startswith("  8")]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    configurations = answer["configurations"]
    keys = [(c["tp"], c["dcp"], c["mtp"]) for c in configurations]
    assert keys == [(8, dcp, mtp) for dcp in (1, 2, 4, 8) for mtp in (0, 1, 2)]
    for row, c in zip(rows, configurations, strict=True):
        assert row[:3] == [str(c[name]) for name in ("tp", "dcp", "mtp")]
        assert row[4:6] == [str(c["kv_tokens"]), str(c["batch"])]
        assert row[-2:] == [f"{c['step_ms']:.1f}", f"{c['output_tokens_per_s']:.0f}"]
        assert c["step_ms"] == pytest.approx(sum(c["milliseconds"].values()))
    assert [c["name"] for c in answer["constants"]] == [c.name for c in CONSTANTS]


WRONG = {
    "--dcp 3": "--dcp: wanted divisors of --tp 8",
    "--dcp 1,x": "--dcp: wanted integers >= 1",
    "--tp 3": "--tp: wanted divisors of --gpus 8",
    "--gpu h201": "--gpu: wanted a100, h100, h200, b200",
    "--gpu memory=141": "--gpu: wanted a100, h100, h200, b200",
    "--gpu h100": "13.8 GiB are missing",
    "--model deepseek-r2": "--model: wanted deepseek-r1",
    "--context 200000": "--context: wanted at most 163840 tokens",
    "--output 0": "--output: wanted an integer >= 1",
    "--acceptance 1.5": "--acceptance: wanted a probability",
    "--model llama-3-8b --mtp 1": "--mtp: wanted 0: llama-3-8b has no MTP module",
    "--model qwen3-30b-a3b --gpus 6 --tp 6": "--tp: wanted divisors of 32 query heads",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_options_are_named(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = "plan --model deepseek-r1 --gpus 8 --gpu h200 --tp 8 --context 2048 --output 1024"
    assert main([*base.split(), *options.split()]) == 2
    line = capsys.readouterr().err
    assert line.startswith("graphattn plan: error: ")
    assert WRONG[options] in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type: wanted one of llama"),
        ({"hidden_size": None}, "hidden_size: wanted a non-negative integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: wanted an integer >= 1"),
        ({"sliding_window": 64}, "sliding_window: wanted layers that see the whole context"),
        ({"dtype": "int4"}, "dtype: wanted one of bfloat16"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: wanted none"),
    ],
)
def test_a_configuration_that_is_not_counted_is_refused(
    change: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    options = f"plan --model {tmp_path} --gpu h200 --context 64 --output 64"
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_can_be_given_by_its_figures() -> None:
    figures = "memory=141,bandwidth=4800,bf16=989,fp8=1979,link=450"
    gpu = find_gpu(figures)
    assert (gpu.memory, gpu.bandwidth, gpu.link) == (141 * 2**30, 4.8e12, 450e9)
    assert (gpu.bf16, gpu.fp8) == (GPUS["h200"].bf16, GPUS["h200"].fp8)


@pytest.mark.parametrize("model", SHIPPED)
def test_every_shipped_configuration_is_answered(model: str) -> None:
    assert one(model=model).output_tokens_per_s > 0


def test_the_command_needs_no_torch() -> None:
    script = f"""
import sys
from graphattn.cli import main
code = main({R1!r}.split() + ["--context", "2048", "--output", "1024"])
found = {{"torch", "numpy", "transformers", "triton"}} & set(sys.modules)
sys.exit(f"imported {{found}}" if found else code)
"""
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "graphattn", *R1.split(), "--context", "2048"]
    with subprocess.Popen(
        [*command, "--output", "1024"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
