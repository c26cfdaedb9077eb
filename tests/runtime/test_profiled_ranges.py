"""What a profiler hears of an engine: captures, stages, layers, replays, waits and counters."""

import json

import pytest

from tests.nvtx_listener import Heard, hear

PROGRAM = """
import json
import torch
torch.set_num_threads(1)
import graphattn
from graphattn import NGram
from profiles.plain_llama import Shape, plain_llama
from tests.runtime.lagging_stream import LaggingStream
from tests.runtime.serving import make_engine
from tests.runtime.tiny_model import TinyModel
from tests.tiny_llama import tiny_llama

stream = LaggingStream(pace=1)  # what was launched runs when somebody waits
engine = make_engine(TinyModel(), stream=stream, max_batch=2, buckets=[2], speculate=NGram(2))
for length in (20, 33):
    engine.submit([5, 6] * 4, max_new_tokens=length, ignore_eos=True)
pages = []
while engine.busy:
    if engine.step():
        pages.append(engine.stats().pages_taken)
    else:
        engine.poll(10.0)
stats = engine.stats()
print(json.dumps([pages, stats.tokens_emitted, stats.tokens_accepted]))

own = plain_llama(Shape(layers=2), max_seq_len=32, device=torch.device("cpu"), dtype=torch.float32)
for model, batch in ((tiny_llama(), 1), (own, 3)):
    graphattn.capture(model, batch, max_tokens=8, page_size=4, buckets=[batch]).close()
"""


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    return hear(PROGRAM, tmp_path_factory.mktemp("engine"))


def test_a_capture_holds_the_stages_and_what_attends(heard: Heard) -> None:
    stages = ["admit", "prepare", "model", "model/attend.0", "model/attend.1", "sample"]
    paths = heard.paths()
    for bucket in ("capture.mixed-16", "capture.decode-6"):
        inside = [path for path in paths if path.startswith(bucket)]
        assert inside == [bucket, *(f"{bucket}/{x}" for x in [*stages, "commit", "draft"])]


def test_each_replay_names_its_bucket_and_its_copies(heard: Heard) -> None:
    paths = [path for path in heard.paths() if path.startswith("replay.")]
    mixed, decode = (
        [bucket, f"{bucket}/copy_in", f"{bucket}/copy_out"]
        for bucket in ("replay.mixed-16", "replay.decode-6")
    )
    steps = len(heard.values("live_rows"))
    assert paths == mixed + (steps - 1) * decode
    assert heard.paths().count("wait") > 1


def test_counters_are_what_the_engine_counts(heard: Heard) -> None:
    pages, emitted, accepted = json.loads(heard.printed)
    rows = heard.values("live_rows")
    assert rows == sorted(rows, reverse=True)
    assert set(rows) == {2, 1}
    assert heard.values("pages_taken") == pages
    assert len(heard.values("emitted_tokens")) == len(rows) == len(pages)
    assert sum(heard.values("emitted_tokens")) == emitted == 20 + 33
    assert sum(heard.values("accepted_tokens")) == accepted > 0


@pytest.mark.parametrize("bucket", ["decode-1", "decode-3"], ids=["transformers", "own model"])
def test_layers_are_named_around_their_attention(bucket: str, heard: Heard) -> None:
    model = f"capture.{bucket}/model"
    layers = [f"{model}/layer.0", f"{model}/layer.0/attend.0"]
    layers += [f"{model}/layer.1", f"{model}/layer.1/attend.1"]
    assert [path for path in heard.paths() if path.startswith(f"{model}/")] == layers
