# Each target sets up what it needs in its own virtual environment, so a fresh clone needs only
# Python 3.11+ and make. VENV names another environment, EXTRAS what is installed into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where it is set, as in many images, each process of the tests compiles the project's modules anew.
unexport PYTHONDONTWRITEBYTECODE
# Also read by the tests that start SGLang.
export SGLANG_VENV ?= $(VENV)-sglang
DB ?= build/fingerprints.db
OUTPUT ?= build/discovery_outputs
SAMPLE := examples/sample/fingerprints.parquet

.PHONY: discover test test-all lint bench sample notebooks test-gpu sanitize-gpu bench-gpu sglang clean

$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[texts]'
	touch $@

# pip would compile 21,000 modules one after the other. A third of them, tests and kinds of models,
# are hardly imported, and a few are for later Pythons.
$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[capture,dev]'
	$(BIN)/python -m compileall -qq -j 0 -x 'site-packages/(.*/)?(tests?|transformers/models)/' \
		$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])') \
		capture_kernels pipeline discovery sidecar cli.py || true
	touch $@ $(VENV)/.base

# SGLang's wheel as it is, on a CPU. Its own needs are gigabytes for a GPU, so it is installed without
# them, beside a list of what it imports on a CPU, and cpu_standins.py stands in for the rest.
$(SGLANG_VENV)/.ready: tests/sglang/requirements.txt pyproject.toml
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps -r tests/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	printf '%s\n' '$(CURDIR)/tests/sglang/standins' 'import cpu_standins' \
		> $$($(SGLANG_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/cpu_standins.pth
	touch $@

sglang: $(SGLANG_VENV)/.ready

# The main job, on the fingerprints of the demo model that ship with the project.
discover: $(VENV)/.base
	mkdir -p build
	$(BIN)/attn db import $(SAMPLE) --db $(DB)
	$(BIN)/attn discover --db $(DB) --output $(OUTPUT) --hours 0 --long-running

# Three files at a time, as tests of processes wait for much of theirs, in the order of
# tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The everyday tests; tests/README.md lists what only test-all runs. Three processes share the cores,
# for which the threads of OpenMP in each would compete, and lay out in fewer epochs
# (tests/quick_layout.py); test-all has them. numba's threads, once started, are as many in torch.
test: export OMP_NUM_THREADS ?= 1
test: export NUMBA_NUM_THREADS ?= 1
test: export LAYOUT_EPOCHS ?= 50
test: $(VENV)/.dev
	$(PYTEST) -m 'not gpu and not slow'

# Everything that needs no GPU, with more examples of each property.
test-all: $(VENV)/.dev $(SGLANG_VENV)/.ready
	$(PYTEST) -m 'not gpu' --hypothesis-profile=all

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every figure that the README quotes.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/run.py --out benchmarks/results

# The shipped fingerprints, from the shipped model and prompts.
sample: $(VENV)/.dev
	rm -f build/sample.db*
	mkdir -p build
	$(BIN)/attn capture --model examples/demo_model --prompts examples/sample/prompts.jsonl \
		--db build/sample.db --layers auto --stride 5 --max-new-tokens 64 --think-tags \
		--session-id sample
	$(BIN)/attn db export $(SAMPLE) --db build/sample.db

$(VENV)/.notebooks: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[notebooks,capture,texts]'
	touch $@

# JupyterLab on the notebooks, with their data: the sample, a run of it, and three nights.
notebooks: $(VENV)/.notebooks
	$(BIN)/python -m discovery.notebook build/notebooks
	$(BIN)/jupytext --quiet --sync notebooks/*.py
	$(BIN)/jupyter lab notebooks

# On a machine with an NVIDIA GPU, with the Python that has its packages: make test-gpu PYTHON=...
test-gpu:
	$(PYTHON) -m pytest -m gpu

# The kernels under NVIDIA's memory checker, each tensor an allocation of its own.
sanitize-gpu:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
		$(PYTHON) -m pytest -m gpu -k 'not graph and not allocates and not 64_bits and not 100K' \
		tests/capture_kernels/test_statistics.py tests/capture_kernels/test_fused_decode.py \
		tests/capture_kernels/test_topk.py tests/capture_kernels/test_steps.py \
		tests/capture_kernels/test_scores.py tests/capture_kernels/test_buffers.py \
		tests/capture_kernels/test_latent.py tests/capture_kernels/test_schedule.py \
		tests/capture_kernels/test_serving.py

bench-gpu:
	$(PYTHON) benchmarks/run.py --gpu --out benchmarks/results

clean:
	rm -rf build $(VENV) $(SGLANG_VENV)
