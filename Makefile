BIN := .venv/bin
READY := .venv/.ready

# The processes of a test run, and the next run, read what one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-sweeps test-newest test-between test-libraries test-cuda test-viewer viewer-in-browser page screenshots lint types check conformance bench benchmark bench-smoke clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' Makefile

# torch comes first and by exact pin: the range in pyproject.toml would fetch several GB of CUDA builds,
# while the exact pin takes the CPU build where one is offered.
$(READY): pyproject.toml constraints.txt
	@echo "Installing whence and its tools into .venv (the first time takes minutes)"
	@python3 -m venv .venv
	@$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

.venv-%/.ready: pyproject.toml constraints.txt requirements/%.txt Makefile
	@echo "Installing whence and its tools with $$(cat requirements/$*.txt) into .venv-$* (several GB the first time)"
	@python3 -m venv .venv-$*
	@grep -v '^torch==' constraints.txt > .venv-$*/constraints.txt
	@.venv-$*/bin/pip install -q -c .venv-$*/constraints.txt -r requirements/$*.txt
	@.venv-$*/bin/pip install -q -c .venv-$*/constraints.txt -e '.[dev]' -r requirements/$*.txt
	@touch $@

# One release of torch for all of them: the oldest, whose CPU build is taken where one is offered.
# Model Explorer comes without its adapters for other formats, which are 130 MB and not for every system.
.venv-libraries/.ready: pyproject.toml constraints.txt Makefile
	@echo "Installing whence and the libraries of tests/libraries into .venv-libraries (the first time takes minutes)"
	@python3 -m venv .venv-libraries
	@.venv-libraries/bin/pip install -q -c constraints.txt torch==2.13.0
	@.venv-libraries/bin/pip install -q -c constraints.txt -e '.[dev,libraries]'
	@.venv-libraries/bin/pip install -q -c constraints.txt --no-deps ai-edge-model-explorer
	@touch $@

demo: $(READY) ## show what whence does, on a small model
	@$(BIN)/whence demo

test: $(READY) ## run the tests, of long tables a sample
	$(BIN)/pytest -n 2 --dist loadgroup

test-sweeps: $(READY) ## run the rows of long tables that `make test` leaves out
	$(BIN)/pytest -n 2 --dist loadgroup -m "sweep and not slow"

test-newest: .venv-newest/.ready ## run the tests and the sweeps on the newest PyTorch, in .venv-newest (ONE_IN=2: half of the sweeps, others for each commit)
	.venv-newest/bin/pytest -n 2 --dist loadgroup -m "not slow" $(if $(ONE_IN),--one-in=$(ONE_IN) --draw=$$(git rev-parse HEAD))

test-between: .venv-between/.ready ## run the tests of what may differ between releases on one in between, in .venv-between
	.venv-between/bin/pytest -n 2 --dist loadgroup -m "not slow" tests/_torch tests/test_golden.py tests/test_models.py

test-libraries: .venv-libraries/.ready ## run the tests of models from other libraries, in .venv-libraries
	.venv-libraries/bin/pytest -n 2 -m "not slow" tests/libraries

test-cuda: $(READY) ## run the tests of CUDA devices: on fakes, and on the device where there is one (set BIN for its PyTorch)
	$(BIN)/pytest -m "not slow" tests/cuda tests/_torch/elsewhere -rs

NODE_IS_NEW := const [major, minor] = process.versions.node.split(".").map(Number); process.exit(major > 20 || (major === 20 && minor >= 19) ? 0 : 1)

test-viewer: ## run the page of program.view() in Chromium, and check that viewer/ builds it (needs Node)
	@if node -e '$(NODE_IS_NEW)' 2> /dev/null && command -v npm > /dev/null; then $(MAKE) --no-print-directory viewer-in-browser; \
	else echo "no Node of 20.19 or later here: the page is neither built nor tested"; fi
	@test -x "$${CHROMIUM:-/usr/bin/chromium}" || echo "no Chromium here (CHROMIUM names one): the page is not tested in a browser"

viewer-in-browser: $(READY) viewer/node_modules/.ready
	$(BIN)/python -m viewer.tests.pages build/pages
	cd viewer && npx tsc --noEmit && PAGES=$(CURDIR)/build/pages npm test --silent

page: viewer/node_modules/.ready ## build src/whence/viewer/page.html from viewer/ (needs Node)
	cd viewer && npm run build --silent

screenshots: $(READY) viewer/node_modules/.ready ## make the pictures of docs/images (needs Node and Chromium)
	$(BIN)/python -m viewer.tests.pages build/pages
	cd viewer && node tests/screenshots.mjs $(CURDIR)/build/pages $(CURDIR)/docs/images

viewer/node_modules/.ready: viewer/package.json viewer/package-lock.json
	cd viewer && npm ci --no-audit --no-fund --silent
	@touch $@

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## check types
	$(BIN)/mypy

check: lint types test ## lint, types and test

conformance: $(READY) ## run the slow tests and the sweeps: every row, every operator and module in PyTorch's tables
	$(BIN)/pytest -n 2 --dist loadgroup -m "slow or sweep or random" --hypothesis-profile conformance

bench: $(READY) ## measure time and memory beside PyTorch's, and compare with the targets
	$(BIN)/python -m benchmarks

benchmark: bench

bench-smoke: $(READY) ## a part of it in under a minute; fails far below a target
	$(BIN)/python -m benchmarks --smoke

bench-cuda: $(READY) ## measure a GPT of 12 layers on a CUDA device beside eager mode (set BIN for its PyTorch)
	$(BIN)/python -W ignore -m benchmarks.device

clean: ## remove caches and build products (delete .venv to install afresh)
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
