"""What each compiled kernel may cost, by kernel, tile and arch: a table that is checked in.

`budgets.json` holds registers per thread (rounded up), stack in bytes per thread (more than 0 means
spills), shared memory in bytes and resident CTAs per multiprocessor, and by disassembly the mix of
instructions that decide over speed, of the whole kernel and of its inner loop. `docs/kernels.md`
shows the same. A kernel that costs more, or has another mix, fails a test. When it is meant to,
renew both from the root of the repository, for all kernels or for those whose names contain a word,
and read the difference:

    python -m tests.kernels.budgets [WORD]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton

from graphattn.kernels.grid import Multiprocessor
from tests.aot import ARCHS, Compiled, Job, compile_all
from tests.kernels.fused_jobs import main_fused_jobs, more_fused_jobs
from tests.kernels.jobs import fp8_jobs, main_jobs, more_jobs
from tests.kernels.step_jobs import step_jobs

BUDGETS = Path(__file__).with_name("budgets.json")
SLACK = 16  # registers, in whole multiples: compilers of other releases differ by a few
COMPILER = f"triton {triton.__version__}"

MULTIPROCESSORS = {
    "sm_80": Multiprocessor(registers=1 << 16, shared=164 << 10, threads=2048),
    "sm_90": Multiprocessor(registers=1 << 16, shared=228 << 10, threads=2048),
    "sm_100": Multiprocessor(registers=1 << 16, shared=228 << 10, threads=2048),
}
MOST_CTAS = 32  # of a multiprocessor, however small they are

# Asynchronous copies, accesses to global memory, spills (local memory); with matrix instructions,
# all that is kept of a mix.
KEPT = ("LDGSTS", "UTMALDG", "LDG", "STG", "LDL", "STL")

Cost = dict[str, Any]


def key(name: str, arch: str) -> str:
    """Name of a kernel in the table."""
    return f"{name} {arch}"


def all_jobs() -> dict[str, Job]:
    """Every kernel of the table."""
    named = [*main_jobs(), *fp8_jobs(), *more_jobs()]
    for arch in ARCHS:
        named += [*main_fused_jobs(arch), *more_fused_jobs(arch), *step_jobs(arch)]
    return {key(name, job.arch): job for name, job in named}


def cost(compiled: Compiled) -> Cost:
    """What is known without disassembly."""
    registers = min(255, -(-compiled.registers // SLACK) * SLACK)
    resident = MULTIPROCESSORS[compiled.arch].resident_blocks(
        registers=registers, shared=compiled.shared, warps=compiled.warps
    )
    return {
        "registers": registers,
        "stack": compiled.stack,
        "shared": compiled.shared,
        "resident": min(resident, MOST_CTAS),
    }


def instructions(compiled: Compiled) -> Cost:
    """The mix of the kernel, and of the loop in which it multiplies matrices."""
    sass = compiled.disassemble()
    return {"mix": _kept(Counter(sass.opcodes)), "loop": _kept(sass.inner_loop)}


def _kept(count: Mapping[str, int]) -> dict[str, int]:
    return {op: n for op, n in sorted(count.items()) if op in KEPT or "MMA" in op}


def load() -> dict[str, Cost]:
    """The table, by `key`."""
    table: dict[str, Cost] = json.loads(BUDGETS.read_text())["kernels"]
    return table


def made_by() -> str:
    """The compiler that the table was made with."""
    return str(json.loads(BUDGETS.read_text())["compiler"])


def excesses(
    found: Mapping[str, Compiled], budgets: Mapping[str, Cost], *, disassemble: bool = False
) -> list[str]:
    """What kernels, by `key`, cost beyond the table, in words; with `disassemble` mixes too."""
    over = []
    for name, compiled in found.items():
        got, budget = cost(compiled), budgets[name]
        if disassemble:
            got |= instructions(compiled)
        over += [f"{name}: {text}" for text in _excess(got, budget)]
    if over:
        over.append(
            f"The table was made by {made_by()}, this is {COMPILER}. If the kernels are meant to "
            "cost that: python -m tests.kernels.budgets [WORD]"
        )
    return over


def _excess(got: Cost, budget: Cost) -> list[str]:
    over = [
        f"{what} {got[what]} > {budget[what]}"
        for what in ("registers", "stack", "shared")
        if got[what] > budget[what]
    ]
    if got["resident"] < budget["resident"]:
        over.append(f"resident CTAs {got['resident']} < {budget['resident']}")
    for what in ("mix", "loop"):
        if what in got and got[what] != budget.get(what):
            over.append(f"instructions of the {what} {got[what]}, not {budget.get(what)}")
    return over


def renew(word: str) -> None:
    """Compile the kernels whose names contain `word`, and write the table and its page."""
    if word and made_by() != COMPILER:
        raise SystemExit(f"made by {made_by()}, this is {COMPILER}: renew the whole table")
    every = all_jobs()
    jobs = {name: job for name, job in every.items() if word in name}
    compiled = compile_all(list(jobs.values()))
    with ThreadPoolExecutor(2) as pool:
        mixes = list(pool.map(instructions, compiled))
    kept = {name: found for name, found in load().items() if name in every} if word else {}
    table = kept | {
        name: cost(result) | mix for name, result, mix in zip(jobs, compiled, mixes, strict=True)
    }
    lines = [f"    {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    BUDGETS.write_text(
        f'{{\n  "compiler": "{COMPILER}",\n  "kernels": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    )


if __name__ == "__main__":
    from tests.kernels.budget_page import write_page

    renew(sys.argv[1] if len(sys.argv) > 1 else "")
    write_page()
