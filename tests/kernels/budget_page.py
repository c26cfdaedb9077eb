"""The table of `docs/kernels.md`, from `budgets.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.aot import ARCHS
from tests.kernels.budgets import Cost, key, load, made_by

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"

# section -> first words of its kernels; what no other takes belongs to the step
SECTIONS = {
    "Attention, decode": ("decode",),
    "Attention, prefill": ("prefill",),
    "Latent attention": ("latent decode", "latent prefill", "latent_merge", "absorb_query"),
    "Merge of splits": ("merge ",),
    "Writes into pages": ("kv_write", "latent_write"),
    "Fused within a layer": ("add_rms_norm", "rope_write", "latent_norm_write", "gated_mul"),
    "The step": (),
}


def tables(costs: Mapping[str, Cost]) -> str:
    """All sections, in Markdown."""
    names = list(dict.fromkeys(full.rpartition(" ")[0] for full in sorted(costs)))
    lines = [f"Made with {made_by()}.", ""]
    for section, words in SECTIONS.items():
        taken = [n for n in names if n.startswith(words)] if words else names
        names = [n for n in names if n not in taken]
        lines += [f"### {section}", "", *_section(taken, costs), ""]
    return "\n".join(lines)


def _section(names: Iterable[str], costs: Mapping[str, Cost]) -> list[str]:
    """A row per kernel and tile."""
    archs = " | ".join(ARCHS)
    rows = [f"| kernel and tile | {archs} | instructions on sm_90 |", "|" + "---|" * 5]
    for name in names:
        of_archs = [costs.get(key(name, arch)) for arch in ARCHS]
        cells = [_cell(found) if found else "-" for found in of_archs]
        mix = costs.get(key(name, "sm_90"), {}).get("mix", {})
        listed = ", ".join(f"{n} {op}" for op, n in mix.items()) or "-"
        rows.append(f"| {name} | {' | '.join(cells)} | {listed} |")
    return rows


def _cell(found: Cost) -> str:
    cell = f"{found['registers']} / {found['resident']} / {found['shared'] / 1024:.1f}"
    if found["stack"]:
        in_loop = sum(found.get("loop", {}).get(op, 0) for op in ("LDL", "STL"))
        cell += f" / {found['stack']} B, {in_loop} in the loop"
    return cell


def write_page() -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables(load()) + END + rest.partition(END)[2])


if __name__ == "__main__":
    write_page()
