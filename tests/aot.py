"""Ahead-of-time compilation of Triton kernels for GPUs that this machine need not have.

The test process may be in interpreter mode, where `@triton.jit` makes no compilable function, so
jobs go to worker processes without TRITON_INTERPRET: this file is imported by tests and is also the
workers' program (one JSON job per line in, one JSON result per line out).

    job = Job("greedy", "_kernel", "sm_90", {"logits_ptr": "*fp32"}, {"BLOCK": 64})
    [result] = compile_all([job])
    assert result.stack == 0

Pointers count as 16-byte aligned, as torch's allocations are; integer scalars get no attribute,
as with `do_not_specialize`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ARCHS = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class Job:
    """One kernel of `graphattn.kernels.<module>` to compile for one architecture."""

    module: str
    kernel: str
    arch: str
    signature: Mapping[str, str]  # run-time arguments: "*bf16", "*i32", "fp32", ...; the rest "i32"
    constants: Mapping[
        str, int | float | bool | str | tuple[int, ...] | None
    ]  # every constexpr argument
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True  # may a product and a sum be rounded once
    unaligned: Sequence[str] = ()  # pointers that need not be 16-byte aligned


@dataclass(frozen=True)
class Compiled:
    """What one compiled kernel costs."""

    arch: str
    warps: int
    registers: int  # per thread
    stack: int  # bytes per thread; more than 0 means spills
    shared: int  # bytes per block
    matrix: str  # matrix instructions it uses: "mma", "wgmma", "tcgen05" or ""
    cubin: str = field(repr=False)  # hexadecimal

    @property
    def instructions(self) -> Mapping[str, int]:
        """SASS opcode -> count. Disassembled at each call, which takes a second."""
        return Counter(self.disassemble().opcodes)

    def disassemble(self) -> Sass:
        """Its machine code, which takes a second."""
        text = _tool("nvdisasm", "-c", bytes.fromhex(self.cubin))
        opcodes: list[str] = []
        labels: dict[str, int] = {}
        loops = []
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(opcodes)
            elif found := _INSTRUCTION.search(line):
                target = labels.get(found[2]) if found[2] else None
                if target is not None:
                    loops.append(slice(target, len(opcodes)))
                opcodes.append(found[1])
        return Sass(opcodes, loops)


@dataclass(frozen=True)
class Sass:
    """Opcodes in order of address, and the spans of all backward branches."""

    opcodes: Sequence[str]
    loops: Sequence[slice]

    @property
    def inner_loop(self) -> Mapping[str, int]:
        """Opcode -> count in the shortest loop with at least half of the matrix instructions.

        The rest may be iterations peeled off; shorter loops are waits and branches laid out apart.
        Empty where no loop has as many, as when it was unrolled.
        """
        bodies = [Counter(self.opcodes[loop]) for loop in self.loops]
        total = _matrix_instructions(Counter(self.opcodes))
        main = [b for b in bodies if b and 2 * _matrix_instructions(b) >= total > 0]
        return min(main, key=Counter.total, default=Counter())


def _matrix_instructions(count: Counter[str]) -> int:
    return sum(n for op, n in count.items() if "MMA" in op)


_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(?:.*`\((\.L_x_\d+)\))?"
)
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_MATRIX = re.compile(r"^\s*(?:@%\w+ )?(mma|wgmma|tcgen05)\.", re.MULTILINE)


def compile_all(jobs: Sequence[Job], workers: int = 2) -> list[Compiled]:
    """Compile every job, results in order. Raises `AssertionError` with the compiler's message."""
    shares = [range(i, len(jobs), workers) for i in range(min(workers, len(jobs)))]
    results: dict[int, Compiled] = {}
    with ThreadPoolExecutor(len(shares) or 1) as pool:
        for share, compiled in zip(
            shares, pool.map(lambda s: _run_worker([jobs[i] for i in s]), shares), strict=True
        ):
            results.update(zip(share, compiled, strict=True))
    return [results[i] for i in range(len(jobs))]


def _run_worker(jobs: Sequence[Job]) -> list[Compiled]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    worker = subprocess.run(
        [sys.executable, __file__],
        input="\n".join(json.dumps(asdict(job)) for job in jobs),
        env=env,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in worker.stdout.splitlines() if line.startswith("{")]
    for job, line in zip(jobs, lines, strict=False):
        assert "error" not in line, f"{job}\n{line['error']}"
    assert len(lines) == len(jobs), f"the compile worker died:\n{worker.stderr[-4000:]}"
    return [Compiled(**line) for line in lines]


def _compile(job: Job) -> Compiled:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = getattr(import_module(f"graphattn.kernels.{job.module}"), job.kernel)
    names = list(fn.arg_names)
    unknown = {*job.signature, *job.constants} - set(names)
    if unknown:
        raise ValueError(f"no arguments of {job.kernel}: {sorted(unknown)}")
    types = dict.fromkeys(job.constants, "constexpr") | dict(job.signature)
    signature = {name: types.get(name, "i32") for name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") and name not in job.unaligned
    }
    # JSON has no tuples
    constants = {k: tuple(v) if isinstance(v, list) else v for k, v in job.constants.items()}
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32),
        options={
            "num_warps": job.num_warps,
            "num_stages": job.num_stages,
            "enable_fp_fusion": job.fp_fusion,
        },
    )
    cubin = compiled.asm["cubin"]
    usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    matrix = _MATRIX.search(compiled.asm["ptx"])
    return Compiled(
        arch=job.arch,
        warps=job.num_warps,
        registers=found["REG"],
        stack=found["STACK"],
        shared=compiled.metadata.shared,
        matrix=matrix[1] if matrix else "",
        cubin=cubin.hex(),
    )


def _tool(name: str, option: str, cubin: bytes) -> str:
    """Output of one of the binary tools that triton ships."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _main() -> None:
    for line in sys.stdin:
        try:
            result = asdict(_compile(Job(**json.loads(line))))
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    _main()
