# Every target sets up .venv by itself; only Python >= 3.10 and make are needed.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
EXTRAS := cli,transformers,deepspeed,test,lint
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# Many tests start an interpreter: without bytecode each would compile the package, which takes a second.
unexport PYTHONDONTWRITEBYTECODE

TORCHES := 2.6 2.7 2.8 2.9 2.10 2.11 2.12 2.13
TORCH ?= 2.6

.PHONY: train learn test test-more test-gpu test-oldest test-torch test-torches test-projects docs lint format bench gpu clean

train: .venv/installed
	@echo "Training a small GPT on 4 processes; after a few steps it says how long that takes here."
	@cd examples/gpt && ../../$(BIN)/python main.py fit --config base.yaml --config hybrid.yaml --config profile.yaml

# What the library does, by hand and from the beginning: ten short scripts.
learn: .venv/installed
	@for lesson in examples/learn/*.py; do echo; echo "=== $$lesson"; \
		OMP_NUM_THREADS=1 $(BIN)/python $$lesson || exit 1; done

# A test may lose a race on a loaded machine. Failed tests therefore run once more, alone, and must pass then.
# An internal error or the crash of a worker has another exit status than failed tests, and fails at once.
PYTEST := $(BIN)/python -m pytest -q
define run_tests
	@rm -rf .pytest_cache
	@$(PYTEST) -m $(1) -n auto --dist worksteal; status=$$?; \
	[ $$status -eq 1 ] || exit $$status; \
	echo; echo "These tests failed beside others. They run again, alone:"; \
	$(PYTEST) -vv -n 0 --last-failed --last-failed-no-failures none
endef

test: .venv/installed
	@echo "About 3,400 tests, many with 2 to 4 processes each. For the duration see CONTRIBUTING.md, Tests."
	$(call run_tests,"not (gpu or ray or browser or more)")

# The other cases of costly tests, and tests that take a cluster of Ray or a browser.
test-more: .venv/browser .venv/ray
	$(BIN)/python -m pytest -q -rs -m "ray or browser"
	$(call run_tests,"more and not (gpu or ray or browser)")

test-gpu: .venv/installed
	$(BIN)/python -m pytest -q -m gpu

# A selection of the tests on another torch: `make test-torch TORCH=2.9`, or an exact version, such as 2.9.0.
test-torch: .venv-torch-$(TORCH)/installed
	.venv-torch-$(TORCH)/bin/python -m tests.torch_versions $(RECORD) -n auto --dist worksteal

test-oldest:
	$(MAKE) test-torch TORCH=$(firstword $(TORCHES))

# Each minor version, one environment after another on the disk. The results go to the page on the compatibility.
test-torches:
	@failed=; for version in $(TORCHES); do \
		$(MAKE) test-torch TORCH=$$version RECORD=--record || failed="$$failed $$version"; \
		rm -rf .venv-torch-$$version; \
	done; test -z "$$failed" || { echo "Failed:$$failed"; exit 1; }

# The programme for one GPU: ten minutes, no network. It uses the Python that runs there if it has torch and lightning,
# with its CUDA; .venv, which constraints.txt gives a torch for CPUs, otherwise.
GPU_PYTHON ?= $(shell $(PYTHON) -c 'import torch, lightning' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
gpu:
	@test -x "$(GPU_PYTHON)" || command -v "$(GPU_PYTHON)" >/dev/null || $(MAKE) .venv/installed
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/gpu.py --out results/gpu

# Projects that others wrote: packages, and files of theirs at fixed commits. PROJECTS_DIR=/folder/with/clones replaces GitHub.
test-projects: .venv-projects/installed
	.venv-projects/bin/python -m tests.projects.sources
	.venv-projects/bin/python -m tests.projects

# The documentation site, in results/site; a warning is an error.
docs: .venv/documentation
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --quiet
	@echo "Wrote results/site/index.html"

.venv/documentation: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	for name in tensor_parallel strategies data_parallel pipeline compression_kernels profiling step_path host checkpoint start; do \
		$(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf .venv .venv-projects .venv-torch-* build dist *.egg-info

.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer was not found; set PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up .venv, once: about 2 GB, a few minutes."
	$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

.venv-projects/installed: pyproject.toml constraints.txt tests/projects/constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer was not found; set PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up .venv-projects, once: about 2 GB, a few minutes."
	.venv-projects/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv .venv-projects
	.venv-projects/bin/python -m pip install -q -c constraints.txt torch
	.venv-projects/bin/python -m pip install -q -c constraints.txt -c tests/projects/constraints.txt \
		-e . pytorch-lightning transformers psutil 'chemprop; python_version >= "3.11"'
	# litgpt asks for older versions of what is there already, which its GPT does not need.
	.venv-projects/bin/python -m pip install -q --no-deps -c tests/projects/constraints.txt litgpt
	touch $@

# The newest release of the version. Its wheel is of the configured index: PyPI's has CUDA in it.
.venv-torch-%/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer was not found; set PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up .venv-torch-$*, once: 2 GB, or 6 GB with CUDA."
	$(@D)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(@D)
	@grep -v '^torch==' constraints.txt >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install -q -c $(@D)/constraints.txt 'torch==$*.*' -e ".[cli,transformers,deepspeed,test]"
	touch $@

# The report's page is tested in Chromium: the system's, or one that playwright downloads; else those tests are skipped.
.venv/browser: .venv/installed
	@for browser in chromium chromium-browser google-chrome; do command -v $$browser >/dev/null && touch $@ && exit 0; done; \
	$(BIN)/python -m playwright install chromium >.venv/browser.log 2>&1 && touch $@ || \
	echo "No browser: Chromium is not on PATH and cannot be downloaded (.venv/browser.log); tests of the page are skipped."

# Ray's tests are skipped where it cannot be installed: they tell the last error in .venv/ray.log.
.venv/ray: .venv/installed
	@echo "Installing Ray, once: 600 MB."
	@$(BIN)/python -m pip install -q --retries 1 -c constraints.txt -e ".[ray]" >.venv/ray.log 2>&1 && touch $@ || \
	echo "Ray cannot be installed (.venv/ray.log), its tests are skipped: $$(grep ERROR .venv/ray.log | tail -n 1)"
