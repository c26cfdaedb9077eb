"""The public door: what it lists, what it hides, and what importing it needs."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import graphattn

PUBLIC = sorted(graphattn.__all__)
ERRORS = {n for n in PUBLIC if n.endswith("Error")}
MODULES = {n for n in PUBLIC if isinstance(getattr(graphattn, n), ModuleType)}
CALLABLES = [n for n in PUBLIC if n not in ERRORS | MODULES]


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)


def test_all_lists_exactly_the_public_names() -> None:
    public = {n for n, v in vars(graphattn).items() if not n.startswith("_")}
    modules = {n for n in public if isinstance(getattr(graphattn, n), ModuleType)}
    assert public - modules <= set(PUBLIC) <= public


def test_every_public_name_is_listed_before_any_is_used() -> None:
    run("import graphattn; names = dir(graphattn); assert set(graphattn.__all__) <= set(names)")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(graphattn, name)), f"graphattn.{name} has no docstring"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_public_module_lists_what_is_public_in_it(name: str) -> None:
    """Everything that it defines, documented."""
    module = getattr(graphattn, name)
    defined = {
        n
        for n, v in vars(module).items()
        if not n.startswith("_") and getattr(v, "__module__", None) == module.__name__
    }
    assert defined <= set(module.__all__)
    for n in module.__all__:
        assert inspect.getdoc(getattr(module, n)), f"graphattn.{name}.{n} has no docstring"


@pytest.mark.parametrize("name", CALLABLES)
def test_unknown_options_fail(name: str) -> None:
    """`**kwargs` would swallow a misspelt option."""
    parameters = inspect.signature(getattr(graphattn, name)).parameters.values()
    assert not [p.name for p in parameters if p.kind is p.VAR_KEYWORD]


def test_import_needs_neither_triton_nor_a_gpu_nor_transformers() -> None:
    run("""
import sys
import graphattn
for name in graphattn.__all__:
    getattr(graphattn, name)
heavy = {"triton", "transformers", "gguf"}
found = heavy & {name.split(".")[0] for name in sys.modules}
assert not found, f"imported {found}"
""")


def test_capture_stays_a_function_whatever_is_imported_first() -> None:
    """The folder `capture/` is imported as `graphattn._capture`, never as `graphattn.capture`."""
    run("""
import importlib, pkgutil
import graphattn._capture
for module in pkgutil.iter_modules(graphattn._capture.__path__, "graphattn._capture."):
    importlib.import_module(module.name)
assert callable(graphattn.capture) and graphattn.capture.__name__ == "capture"
""")
