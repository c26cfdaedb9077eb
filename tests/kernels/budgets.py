"""What each compiled kernel may cost: registers, stack and shared memory by kernel, tile and arch.

The tiles of latent attention use all registers there are. What they may cost also says what their
inner loop holds: matrix instructions, asynchronous copies, and no spills, which their stack is for.

`budgets.json` is checked in and held by test_aot.py. After a change that is meant to cost more, or
for a new tile, renew it from the root of the repository and read the difference:

    python -m tests.kernels.budgets
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.aot import Compiled, Job, compile_all
from tests.kernels.jobs import fp8_jobs, main_jobs, more_jobs

BUDGETS = Path(__file__).with_name("budgets.json")
SLACK = 16  # registers, in whole multiples: compilers of other releases differ by a few


def key(name: str, job: Job) -> str:
    return f"{name} {job.arch}"


def cost(name: str, compiled: Compiled) -> dict[str, Any]:
    found: dict[str, Any] = {
        "registers": min(255, -(-compiled.registers // SLACK) * SLACK),
        "stack": compiled.stack,
        "shared": compiled.shared,
    }
    if name.startswith(("latent decode", "latent prefill")):
        inner = compiled.disassemble().inner_loop
        kept = ("MMA", "LDGSTS", "LDL", "STL")
        found["loop"] = {
            op: count for op, count in sorted(inner.items()) if any(x in op for x in kept)
        }
    return found


def renew() -> None:
    """Compile everything and write the table."""
    jobs = {key(name, job): job for name, job in [*main_jobs(), *fp8_jobs(), *more_jobs()]}
    compiled = compile_all(list(jobs.values()))
    table = {name: cost(name, result) for name, result in zip(jobs, compiled, strict=True)}
    lines = [f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table)]
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    renew()
