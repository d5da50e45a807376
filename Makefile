# make demo   train GPT-2 124M on real text with its states on disk
# make test   pass the tests
# make test-device   pass those on an emulated accelerator
# make gpu   on a machine with a CUDA device: self-test, device tests and measured steps
# make lint   what CI checks beside them
# make docs   the documentation as a site, in build/site
# Each sets up what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := $(shell find csrc -type f) CMakeLists.txt pyproject.toml
DEMO_STEPS ?= 50
# Without stored bytecode, each process of the tests would compile the package and rewrite the tests' assertions.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-device gpu gpu-selftest gpu-test gpu-step lint docs format sanitize clean

demo: $(VENV)/.built
	$(BIN)/infinity train --model gpt2 --config configs/nvme-fp32.json --steps $(DEMO_STEPS) --output build/demo

# One process more than cores: tests wait for drives, links and ranks for a third of the time.
test: $(VENV)/.built
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# Apart: the emulated device is the accelerator of the whole process.
test-device: $(VENV)/.built
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal tests/device

# `make --keep-going gpu` measures even if a test fails.
gpu: gpu-selftest gpu-test gpu-step

gpu-selftest: $(VENV)/.built
	$(BIN)/infinity selftest --device cuda

# One process: several would share the card's memory, which some tests measure.
gpu-test: $(VENV)/.built
	INFINITY_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/device

GPU_STEP = $(BIN)/python benchmarks/gpu_step.py --device cuda --into benchmarks/results
gpu-step: $(VENV)/.built
	$(GPU_STEP) --preset 1.3b
	$(GPU_STEP) --preset 1.3b --clip 1.0 --name 1.3b-clip
	$(GPU_STEP) --preset 1.3b --offload-param none --offload-optimizer none --systems infinity,torch --name 1.3b-on-device
	$(GPU_STEP) --preset 8b --offload-param none --systems infinity

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/count_placement_branches.py --most 46
	$(BIN)/python tools/check_words.py
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.cpp' -o -name '*.h')
	PATH="$(abspath $(BIN)):$$PATH" tools/check_warnings.sh

docs: $(VENV)/.built
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(VENV)/.built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests -name '*.cpp' -o -name '*.h')

# The I/O engines under AddressSanitizer with UBSan, then under ThreadSanitizer.
sanitize:
	tools/sanitize.sh

clean:
	rm -rf $(VENV) build infinity/*.so

# Set-up #

$(VENV)/.created: tools/install_system_packages.sh
	tools/install_system_packages.sh
	$(PYTHON) -m venv $(VENV)
	touch $@

# torch first and by its exact version, so that nothing pulls another build of it.
$(VENV)/.dependencies: pyproject.toml constraints-dev.txt $(VENV)/.created
	$(PIP) install -c constraints-dev.txt torch==2.13.0
	$(PIP) install -c constraints-dev.txt scikit-build-core pybind11 cmake ninja
	touch $@

$(VENV)/.built: $(VENV)/.dependencies $(SOURCES)
	$(PIP) install --no-build-isolation -c constraints-dev.txt -e ".[train,plot,checksum,dev]"
	touch $@
