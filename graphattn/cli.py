"""The command `graphattn`: generate, demo, audit, inspect, plan, profile-report.

Exit codes: 0 success, 1 the demo found a difference, or the audit or the report of a profile
something, 2 a wrong argument or a missing piece, with one line on stderr that says what to do, 130
interrupted, 141 nobody read on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphattn.errors import GraphAttnError, wrong
from graphattn.planner.command import add_options, answer

if TYPE_CHECKING:
    import torch

    from graphattn.draft import Speculation
    from graphattn.report import Stats
    from graphattn.request import SamplingParams
    from graphattn.text import Loaded

LINE_WIDTH = 88


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except GraphAttnError as error:
        line = " ".join(str(error).split())
        print(f"graphattn {arguments.command}: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough; what Python still flushes goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphattn", description="One captured graph per decode step.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="answer prompts with a model, streaming", allow_abbrev=False
    )
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "--model", required=True, help="a transformers folder, or smollm2 for the demo's model"
    )
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="repeat for more prompts"
    )
    generate.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N")
    generate.add_argument(
        "--max-batch", type=_positive, metavar="N", help="slots; default: prompts, at most 8"
    )
    generate.add_argument("--max-seq-len", type=_positive, metavar="N")
    generate.add_argument("--backend", choices=("auto", "cuda", "host", "eager"), default="auto")
    generate.add_argument(
        "--dcp", type=_positive, default=1, metavar="W", help="ranks that share each KV cache"
    )
    generate.add_argument("--interleave", type=_positive, default=1, metavar="I")
    generate.add_argument("--reduce", choices=("ag_rs", "a2a"), default="ag_rs")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--top-k", type=int, default=0, metavar="K")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P")
    generate.add_argument("--seed", type=int, help="of the first prompt; the next ones count on")
    generate.add_argument(
        "--speculate",
        metavar="HOW",
        help="ngram:K, mtp:K or draft:MODEL_FOLDER:K; changes no token",
    )

    demo = commands.add_parser(
        "demo", help="a real model answered, checked and timed in one run", allow_abbrev=False
    )
    demo.set_defaults(run=_demo)

    audit = commands.add_parser(
        "audit", help="list what a CUDA graph cannot hold, without a GPU", allow_abbrev=False
    )
    audit.set_defaults(run=_audit)
    audit.add_argument(
        "target",
        metavar="TARGET",
        help="a transformers folder (its whole step, from config.json alone), or MODULE:CALLABLE",
    )
    audit.add_argument(
        "--advance",
        metavar="MODULE:CALLABLE",
        help="called between two runs: what a loop moves on between steps on the host",
    )
    audit.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of weights"
    )
    audit.add_argument("--json", action="store_true", help="one JSON object on stdout")

    inspect = commands.add_parser(
        "inspect", help="what capturing a model makes here, node by node", allow_abbrev=False
    )
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("folder", type=Path, metavar="FOLDER", help="a transformers folder")
    inspect.add_argument("--max-batch", type=_positive, default=8, metavar="N", help="slots")
    inspect.add_argument("--max-seq-len", type=_positive, metavar="N")
    inspect.add_argument("--json", action="store_true", help="one JSON object on stdout")

    profile = commands.add_parser(
        "profile-report",
        help="where the time of replayed graphs went, and what held them up",
        allow_abbrev=False,
    )
    profile.set_defaults(run=_profile_report)
    profile.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="nsys export --type sqlite, or a torch.profiler trace",
    )
    profile.add_argument("--json", action="store_true", help="one JSON object on stdout")
    profile.add_argument("--trace", type=Path, metavar="OUT", help="write a trace for Perfetto")
    profile.add_argument("--html", type=Path, metavar="OUT", help="write one HTML page")

    plan = commands.add_parser(
        "plan",
        help="what fits on how many GPUs, and how fast, from configuration files only",
        allow_abbrev=False,
    )
    plan.set_defaults(run=_plan)
    add_options(plan)
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer >= 1, got {text!r}")
    return value


def _demo(arguments: argparse.Namespace) -> int:
    from graphattn.demo.show import demo

    return 0 if demo(_write) else 1


def _audit(arguments: argparse.Namespace) -> int:
    import torch

    from graphattn.checks import audit
    from graphattn.rehearse import audit_folder, named_callable

    folder = Path(arguments.target)
    if folder.is_dir():
        if arguments.advance:
            raise wrong("--advance", "a TARGET of MODULE:CALLABLE", folder, "Leave it out.")
        report = audit_folder(folder, getattr(torch, arguments.dtype))
    elif ":" in arguments.target:
        advance = named_callable(arguments.advance) if arguments.advance else None
        report = audit(named_callable(arguments.target), advance=advance)
    else:
        raise wrong("TARGET", "a folder or MODULE:CALLABLE", arguments.target, "Say steps:decode.")
    _write(report.to_json() if arguments.json else str(report))
    return 0 if report.ok else 1


def _inspect(arguments: argparse.Namespace) -> int:
    from graphattn.inspecting import inspect_folder

    report = inspect_folder(
        arguments.folder,
        _device("auto"),
        max_batch=arguments.max_batch,
        max_seq_len=arguments.max_seq_len,
    )
    _write(report.to_json() if arguments.json else f"{report}\n\n{report.details()}")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    _write(answer(arguments))
    return 0


def _profile_report(arguments: argparse.Namespace) -> int:
    from graphattn.profiling.page import page
    from graphattn.profiling.perfetto import trace_json
    from graphattn.profiling.reading import read_profile
    from graphattn.profiling.report import analyse

    profile = read_profile(arguments.file)
    report, replays = analyse(profile)
    if arguments.trace:
        _save("--trace", arguments.trace, trace_json(profile, replays, report.gaps))
    if arguments.html:
        _save("--html", arguments.html, page(report, profile, replays))
    _write(report.to_json() if arguments.json else str(report))
    return 0 if report.ok else 1


def _save(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise wrong(
            option, "a file that can be written", f"{path}: {error}", "Name another."
        ) from None


def _generate(arguments: argparse.Namespace) -> int:
    from graphattn.capturing import capture
    from graphattn.demo import smollm2
    from graphattn.demo.runs import run_engine
    from graphattn.launch import context_parallel
    from graphattn.text import LineWriter, TextStream, encode, load

    smol = arguments.model == "smollm2"
    loaded = load(smollm2.folder() if smol else Path(arguments.model), _device(arguments.backend))
    prompts = encode(loaded.tokenizer, arguments.prompt)
    streams = [TextStream(loaded.tokenizer) for _ in prompts]
    lines = [LineWriter(f"[{i}]", LINE_WIDTH, _write) for i, _ in enumerate(prompts, 1)]

    def on_tokens(index: int, token_ids: Sequence[int], finished: bool) -> None:
        lines[index].feed(streams[index].feed(token_ids))
        if finished:
            lines[index].close()

    layout = (arguments.dcp, arguments.interleave, arguments.reduce)
    with (
        context_parallel(*layout) as dcp,
        capture(
            loaded.model,
            max_batch=arguments.max_batch or min(len(prompts), 8),
            max_seq_len=arguments.max_seq_len,
            backend=arguments.backend,
            dcp=dcp,
            speculate=_speculation(arguments.speculate, loaded),
            progress=True,
        ) as engine,
    ):
        if engine.leads:
            run_engine(engine, prompts, _params(arguments, len(prompts)), on_tokens=on_tokens)
            if arguments.speculate is not None:
                _write(_acceptance(engine.stats()))
        else:
            engine.follow()
    return 0


def _params(arguments: argparse.Namespace, count: int) -> list[SamplingParams]:
    from graphattn.request import SamplingParams

    return [
        SamplingParams(
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=None if arguments.seed is None else arguments.seed + i,
        )
        for i in range(count)
    ]


def _speculation(text: str | None, loaded: Loaded) -> Speculation | None:
    """`ngram:K`, `mtp:K` or `draft:FOLDER:K`, the draft model on the device of the target."""
    from graphattn.draft import NGram
    from graphattn.draft_model import DraftModel
    from graphattn.mtp import MTP
    from graphattn.text import load

    if text is None:
        return None
    kind, _, rest = text.partition(":")
    folder, _, count = rest.rpartition(":")
    if kind == "ngram" and not folder and count.isdecimal():
        return NGram(int(count))
    if kind == "mtp" and not folder and count.isdecimal():
        return MTP(int(count))
    if kind == "draft" and folder and count.isdecimal():
        return DraftModel(load(Path(folder), loaded.model.device).model, int(count))
    raise wrong("speculate", "ngram:K, mtp:K or draft:MODEL_FOLDER:K", text, "Say ngram:3.")


def _acceptance(stats: Stats) -> str:
    places = ", ".join(
        f"{accepted}/{drafted}"
        for accepted, drafted in zip(stats.accepted_by_place, stats.drafted_by_place, strict=True)
    )
    return (
        f"{stats.tokens_emitted} tokens in {stats.steps} steps; drafts accepted "
        f"{stats.tokens_accepted} of {stats.tokens_drafted} (by place: {places})"
    )


def _device(backend: str) -> torch.device:
    import torch

    wants_cuda = backend == "cuda" or (backend != "host" and torch.cuda.is_available())
    if wants_cuda and not torch.cuda.is_available():
        raise GraphAttnError("--backend cuda: no CUDA device is visible. Use --backend host.")
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if wants_cuda else "cpu")


def _write(line: str) -> None:
    print(line, flush=True)
