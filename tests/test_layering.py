"""Imports point one way, host and device meet in two files, files stay short, ops have oracles."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

# Data flows down this list; a module imports only modules above its own. `models` stands where the
# contract is needed; the adapters beside it are known to `capture` and its clients only.
FLOW = [
    "versions",
    "errors",
    "tables",
    "difference",
    "bounds",
    "arguments",
    "work",
    "ops",
    "convert",
    "models",
    "groups",
    "dcp",
    "config",
    "stream",
    "graph",
    "checks",
    "parity",
    "testing",
    "inputs",
    "state",
    "metadata",
    "epoch",
    "foreign",
    "prefix",
    "pages",
    "layer_checks",
    "attention",
    "ring",
    "sample",
    "commit",
    "slots",
    "memory",
    "view",
    "given",
    "step_buffers",
    "drafting",
    "draft",
    "draft_model",
    "mtp_overlap",
    "mtp",
    "step",
    "request",
    "outbox",
    "seat",
    "plan",
    "scheduler",
    "policy",
    "sizing",
    "footprint",
    "fitting",
    "graphs",
    "runner",
    "lockstep",
    "report",
    "checkup",
    "engine",
    "capturing",
    "calibrating",
    "aio",
    "door",
    "launch",
    "text",
    "rehearse",
    "layer_nodes",
    "inspecting",
    "planner",
    "profiling",
    "demo",
    "cli",
    "__main__",
]
DOOR = "__init__"  # the public door imports what it likes
# They use the engine, or the models of tests: tokens are theirs.
CLIENTS = {"parity", "testing", "text", "demo", "cli", "__main__"}
MODEL_USERS = {
    "models",
    "calibrating",
    "capturing",
    "engine",
    "footprint",
    "inspecting",
    "layer_nodes",
    "lockstep",
    "runner",
    "rehearse",
    "draft_model",
    "mtp",
    "mtp_overlap",
} | CLIENTS

KERNELS = sorted(ROOT.glob("kernels/**/*.py"))
LEAVES = [*KERNELS, *sorted(ROOT.glob("capture/**/*.py"))]
LINKED = {"kernels", "_capture"}


def in_runtime() -> list[Path]:
    files = (p.relative_to(ROOT / "graphattn") for p in ROOT.glob("graphattn/**/*.py"))
    return sorted(ROOT / "graphattn" / p for p in files if p.parts[0] not in LINKED)


RUNTIME = in_runtime()
TESTED = [p for folder in ("tests", "profiles", "examples") for p in ROOT.glob(f"{folder}/**/*.py")]


def name(path: Path) -> str:
    """Path relative to the repository, for test ids and messages."""
    return str(path.relative_to(ROOT))


def stage(path: Path) -> str:
    """First part of a runtime file's path: `models` of graphattn/models/contract.py."""
    return path.relative_to(ROOT / "graphattn").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names that `path` imports, also inside functions; relative ones keep their dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", LEAVES, ids=name)
def test_leaves_import_neither_the_runtime_nor_each_other(path: Path) -> None:
    """Siblings only: `from .module import X` has one dot."""
    bad = [n for n in imports(path) if n.startswith(("..", "graphattn", "kernels", "capture"))]
    assert not bad, f"{name(path)} imports {bad}"


@pytest.mark.parametrize("path", RUNTIME, ids=name)
def test_runtime_imports_only_earlier_stages(path: Path) -> None:
    own = stage(path)
    if own == DOOR:
        return
    assert own in FLOW, f"{name(path)}: give it its place in FLOW, where data passes it"
    used = {n.split(".")[1] for n in imports(path) if n.startswith("graphattn.")}
    later = {n for n in used if n in FLOW and FLOW.index(n) > FLOW.index(own)}
    assert not later, f"{name(path)} imports later stages {sorted(later)}"


@pytest.mark.parametrize("path", RUNTIME, ids=name)
def test_runtime_imports_itself_by_its_full_name(path: Path) -> None:
    relative = [n for n in imports(path) if n.startswith(".")]
    assert not relative, f"{name(path)}: write `from graphattn.x import y` for {relative}"


@pytest.mark.parametrize("path", RUNTIME, ids=name)
def test_only_capture_knows_the_model_adapters(path: Path) -> None:
    if stage(path) in MODEL_USERS | {DOOR}:
        return
    models = {n.split(".")[2] for n in imports(path) if n.startswith("graphattn.models.")}
    assert models <= {"contract"}, f"{name(path)} imports the adapters {sorted(models)}"


HOST_READS = {"item", "tolist", "cpu", "numpy"}
HOST_WRITES = {"tensor", "as_tensor", "from_numpy", "pin_memory", "cuda"}

# (file, call) -> why it is neither a read of a device value nor a hidden copy in the step.
CROSSINGS = {
    ("graphattn/lockstep.py", "cpu"): "of norm weights, compared over ranks before capture",
    ("graphattn/lockstep.py", "numpy"): "of norm weights, compared over ranks before capture",
    ("graphattn/request.py", "tolist"): "of a caller's prompt, before it is queued",
    ("graphattn/foreign/conformance.py", "cpu"): "of results, in a test of kernels",
    ("graphattn/foreign/conformance_step.py", "tensor"): "a step of that test",
    ("graphattn/foreign/conformance_step.py", "tolist"): "of metadata, to lay out that step",
}
CROSSERS = {"inputs": HOST_WRITES | {"numpy"}, "ring": HOST_READS}  # numpy(): staging on the host


def crossings(path: Path) -> set[str]:
    """Names of the calls in `path` that move data between host and device."""
    calls = (n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
    called = {f.attr for f in calls if isinstance(f, ast.Attribute)}
    return called & (HOST_READS | HOST_WRITES)


@pytest.mark.parametrize("path", RUNTIME, ids=name)
def test_host_and_device_meet_in_inputs_and_ring_only(path: Path) -> None:
    if stage(path) in CLIENTS:
        return
    listed = {call for file, call in CROSSINGS if file == name(path)}
    found = crossings(path) - CROSSERS.get(stage(path), set())
    assert found == listed, f"{name(path)} calls {sorted(found)}, listed are {sorted(listed)}"


@pytest.mark.parametrize("path", [*LEAVES, *RUNTIME, *TESTED], ids=name)
def test_file_fits_in_one_sitting(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{name(path)} has {lines} lines; split it by concern"


def ops() -> list[str]:
    """Names of the operations that kernels/ops.py and kernels/fused_ops.py define."""
    trees = [ast.parse((ROOT / "kernels" / f).read_text()) for f in ("ops.py", "fused_ops.py")]
    defined = [
        node.args[0].value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "define"
        and isinstance(node.args[0], ast.Constant)
    ]
    return [str(op) for op in defined]


def test_operations_are_found() -> None:
    assert {"prepare", "kv_write", "attend", "greedy", "commit", "rope_write"} <= set(ops())


@pytest.mark.parametrize("op", ops())
def test_every_operation_has_its_kernel_its_oracle_and_its_test(op: str) -> None:
    wanted = [f"kernels/{op}.py", f"kernels/{op}_cpu.py", f"kernels/{op}_ref.py"]
    missing = [f for f in [*wanted, f"tests/kernels/test_{op}.py"] if not (ROOT / f).is_file()]
    assert not missing


@pytest.mark.parametrize("path", [p for p in KERNELS if p.stem.endswith("_ref")], ids=name)
def test_an_oracle_shares_no_code_with_its_kernel(path: Path) -> None:
    siblings = [n for n in imports(path) if n.startswith(".")]
    assert all(n.split(".")[1].endswith("_ref") for n in siblings), f"{name(path)}: {siblings}"


@pytest.mark.parametrize(("folder", "link"), [("kernels", "kernels"), ("capture", "_capture")])
def test_folder_is_packaged_by_a_committed_symlink_only(folder: str, link: str) -> None:
    path = f"graphattn/{link}"
    entry = subprocess.check_output(["git", "ls-files", "-s", path], cwd=ROOT, text=True)
    assert entry.startswith("120000 "), f"{path} must be committed as a symlink"
    assert (ROOT / path).resolve() == ROOT / folder
    # With an __init__.py, `import kernels` from the root would find it: transformers does that.
    assert not (ROOT / folder / "__init__.py").exists()
