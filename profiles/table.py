"""`python -m profiles.table`: the table of the README, from the last run of its benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from profiles.record import RESULTS, Record, latest

HEAD = (
    "| measured | graphattn | beside it | ratio | of roofline |",
    "|---|---|---|---|---|",
)


def table(results: Path) -> str:
    """In Markdown. `ratio` above 1 is in our favour."""
    parts = (_decode, _bounds, _serving, _speculation, _mtp)
    names = ("decode", "bounds", "serving", "speculation", "mtp")
    rows = [
        row for part, name in zip(parts, names, strict=True) for row in part(latest(results, name))
    ]
    return "\n".join([*HEAD, *rows])


def _row(what: str, ours: str, beside: str, record: Record, ratio: float | None = None) -> str:
    ratio = record.get("ratio") if ratio is None else ratio
    share = f"{record['roofline']['of_bound']:.0%}" if "roofline" in record else ""
    cells = (what, ours, beside, "" if ratio is None else f"{ratio:.2f}", share)
    return f"| {' | '.join(cells)} |"


def _decode(records: list[Record]) -> Iterator[str]:
    for r in records:
        if "against" in r:
            theirs = f"`{r['against']}` {_ms(r, 'theirs_s')}"
            yield _row(f"decode step, batch {r['batch']}", _ms(r, "ours_s"), theirs, r)


def _bounds(records: list[Record]) -> Iterator[str]:
    r = records[-1]
    smallest = records[0]["max_seq_len"]
    what = f"decode step, batch {r['batch']}, `max_seq_len` {r['max_seq_len']:,}"
    yield _row(what, _ms(r, "ours_s"), f"{smallest}, same lengths: {_ms(r, 'theirs_s')}", r)


def _serving(records: list[Record]) -> Iterator[str]:
    parts = {r["part"]: r for r in records if r["part"] in ("throughput", "prefixes")}
    r = parts["throughput"]
    what = f"{r['requests']} requests of mixed lengths, 8 slots"
    beside = f"`{r['against']}` {_rate(r['theirs_tokens_per_s'])}"
    yield _row(what, _rate(r["tokens_per_s"]), beside, r)
    r = parts["prefixes"]
    what = f"{r['prompts']} prompts, {r['shared']} of {r['prompt_tokens']} tokens equal"
    without = f"without prefix reuse {r['theirs_call_s']['median']:.2f} s"
    yield _row(what, f"{r['call_s']['median']:.2f} s", without, r)
    whole, chunked = (r for r in records if r["part"] == "long_prompt")
    what = f"pause of decoding rows for a prompt of {whole['prompt_tokens']}, in chunks"
    ours, theirs = chunked["longest_pause_s"], whole["longest_pause_s"]
    yield _row(what, f"{ours:.2f} s", f"whole {theirs:.2f} s", chunked, theirs / ours)
    host = next(r for r in records if r["part"] == "host" and r["device"] == "instant")
    what = f"host's own time of a step, {host['rows']} rows"
    yield _row(what, _ms(host, "host_s"), "", host)


def _speculation(records: list[Record]) -> Iterator[str]:
    wanted = {
        ("repeats", 5): "SmolLM2 repeats itself",
        ("copies", 5): "SmolLM2 copies a text",
        ("held-out", 1): "miniature, batch 8",
    }
    for r in records:
        if (r["text"], r["k"]) in wanted:
            what = f"`{r['drafter']}({r['k']})`, {wanted[r['text'], r['k']]}"
            plain = f"without drafts {_rate(r['plain_tokens_per_s'])}"
            yield _row(what, _rate(r["tokens_per_s"]), plain, r)


def _mtp(records: list[Record]) -> Iterator[str]:
    for r in records:
        ours, theirs = (r["new_tokens"] / r[f]["median"] for f in ("call_s", "theirs_call_s"))
        what = f"`MTP({r['k']})`, miniature, batch {r['batch']}"
        yield _row(what, _rate(ours), f"`{r['against']}` {_rate(theirs)}", r)


def _ms(record: Record, field: str) -> str:
    return f"{1e3 * record[field]['median']:.3g} ms"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.3g} tokens/s"


if __name__ == "__main__":
    print(table(RESULTS))
