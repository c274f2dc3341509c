BIN := .venv/bin
READY := .venv/.ready
NEWEST := 2.15.0
NEWEST_BIN := .venv-newest/bin
NEWEST_READY := .venv-newest/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-newest lint types check conformance bench benchmark bench-smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

# torch comes first and by exact pin: the range in pyproject.toml would fetch several GB of CUDA builds,
# while the exact pin takes the CPU build where one is offered.
$(READY): pyproject.toml constraints.txt
	@echo "Installing whence and its tools into .venv (the first time takes minutes)"
	@python3 -m venv .venv
	@$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(NEWEST_READY): pyproject.toml constraints.txt Makefile
	@echo "Installing whence and its tools with PyTorch $(NEWEST) into .venv-newest (several GB the first time)"
	@python3 -m venv .venv-newest
	@grep -v '^torch==' constraints.txt > .venv-newest/constraints.txt
	@$(NEWEST_BIN)/pip install -q -c .venv-newest/constraints.txt torch==$(NEWEST)
	@$(NEWEST_BIN)/pip install -q -c .venv-newest/constraints.txt -e '.[dev]' torch==$(NEWEST)
	@touch $@

demo: $(READY) ## show what whence does, on a small model
	@$(BIN)/whence demo

test: $(READY) ## run the tests
	$(BIN)/pytest -n 2

test-newest: $(NEWEST_READY) ## run the tests on the newest PyTorch, in .venv-newest
	$(NEWEST_BIN)/pytest -n 2

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## check types
	$(BIN)/mypy

check: lint types test ## lint, types and test

conformance: $(READY) ## run the slow tests, among them every operator and module in PyTorch's tables
	$(BIN)/pytest -n 2 -m slow

bench: $(READY) ## measure time and memory beside PyTorch's, and compare with the targets
	$(BIN)/python -m benchmarks

benchmark: bench

bench-smoke: $(READY) ## a part of it in under a minute; fails far below a target
	$(BIN)/python -m benchmarks --smoke

clean: ## remove caches and build products (delete .venv to install afresh)
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
