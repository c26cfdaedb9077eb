"""What a user installs: every module under `graphattn`, none at the top level."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKS = {"graphattn/kernels": "kernels", "graphattn/_capture": "capture"}
BUILD_INPUTS = ["pyproject.toml", "README.md", "LICENSE"]
FOLDERS = ["graphattn", "kernels", "capture"]


def modules_of_the_checkout() -> set[str]:
    files = {str(p.relative_to(ROOT)) for p in ROOT.glob("graphattn/**/*.py")}
    files = {f for f in files if not f.startswith(tuple(LINKS))}
    for link, folder in LINKS.items():
        real = ROOT / folder
        files |= {f"{link}/{p.relative_to(real)}" for p in real.glob("**/*.py")}
    return files


def test_wheel_ships_every_module_and_no_top_level_kernels(tmp_path: Path) -> None:
    # From a copy: setuptools would reuse stale files of the checkout's build folder.
    source = tmp_path / "source"
    for folder in FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignore)
    for file in BUILD_INPUTS:
        shutil.copy(ROOT / file, source / file)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert {n for n in shipped if n.endswith(".py")} == modules_of_the_checkout()
    assert "graphattn/py.typed" in shipped
    configs = {p.name for p in ROOT.glob("graphattn/planner/configs/*.json")}
    assert configs == {Path(n).name for n in shipped if "planner/configs/" in n}
    assert any(n.endswith("LICENSE") for n in shipped)
