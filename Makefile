# Every target makes the virtual environment it needs; `make demo` and `make test` are all a newcomer needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: help demo check test lint types schema docs bench chaos simulation cluster clients vllm load memory fuzz audit requirements format clean

JOBS ?= 2
SEED ?= 1
MINUTES ?= 30
STORE ?= sqlite
STORAGE ?= folder
REPLICAS ?= 1
ENGINES ?= 2
RANKS ?= 1
CLUSTER ?= none
OPERATIONS ?= inf
STEPS ?= 12
ITERATIONS ?= 10000

help:
	@echo "make demo          start a server, fine-tune the embedded model, sample before and after"
	@echo "make test          everything: lint, types, and all tests"
	@echo "make check         the same without the slow tests, for every day"
	@echo "make lint types    one check each"
	@echo "make schema        write the generated reference pages"
	@echo "make docs          build the documentation into site/, and run what it says"
	@echo "make bench         benchmarks, as ratios against peers (PARTS=\"codec client …\")"
	@echo "make load          500 clients, 4,000 held polls, 1,000 requests a second, for ten minutes"
	@echo "make memory        ten thousand iterations of reinforcement learning leave memory flat (ITERATIONS=10000)"
	@echo "make fuzz          many more random requests, bytes and model settings than make test tries"
	@echo "make audit         bandit, and pip-audit where its advisory service can be reached"
	@echo "make chaos         break everything while clients train (SEED=1 MINUTES=30 STORE=sqlite or postgres STORAGE=folder or s3 REPLICAS=1 ENGINES=2 RANKS=1 CLUSTER=none, tcp or ray OPERATIONS=10000 STEPS=12)"
	@echo "make simulation    lives of several servers in simulated time, until so many operations were compared (OPERATIONS=10000 SEED=1)"
	@echo "make cluster       the official client's tests on three Ray nodes, of which every server loses one; Ray's autoscaler brings nodes"
	@echo "make clients       litellm, inspect, openai-agents, renderers and Claude Code against a server (CLIENTS=litellm)"
	@echo "make vllm          vLLM, on the CPU, computes with exports what the server does"
	@echo "make requirements  every requirement with the tests that cite it"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tinsmith needs Python 3.11 or later; name one: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) tools/venv_options.py) $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
		echo "installing into $(VENV): PyTorch and about 100 smaller packages."; \
		test "$$(uname -s)" != Linux || \
			printf '%s\n' "PyPI's PyTorch for Linux brings about 2.4 GB of CUDA packages. To avoid them stop here (Ctrl-C), install PyTorch's CPU build, and run make again:" \
				"  $(BIN)/pip install $$(grep ^torch== constraints.txt) --index-url https://download.pytorch.org/whl/cpu"; }
	@$(INSTALL) --upgrade pip && $(INSTALL) -e '.[all]' --group test || \
		{ echo "The packages could not be installed (pip says why above): see to the network and the disk, and run make again" >&2; exit 1; }
	@touch $@

demo: $(STAMP)
	$(BIN)/python tools/demo.py

# Tests start hundreds of Python processes, and each would compile the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

# One thread of arithmetic per process: servers, engines and clients share the cores, and threads
# that spin for one another on a busy machine made a run of 15 minutes one of two hours.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: lint types requirements $(STAMP)
	$(PYTEST) -p tests.support.durations

# A third of what quick tests take is waiting, so one process more than there are cores. Their files
# are in memory, so those of a test that passed go at once.
check: JOBS = 3
check: lint types $(STAMP)
	PYTEST_DEBUG_TEMPROOT=$$($(BIN)/python tools/scratch_folder.py) $(PYTEST) -q -o tmp_path_retention_policy=failed -m "not slow and not real_model"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy $(wildcard examples/*.py) tests/architecture/typed_surface.py
	MYPYPATH=examples/chapters $(BIN)/mypy $(wildcard examples/chapters/*.py)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(STAMP)
	@for tool in tools/write_*.py; do $(BIN)/python $$tool || exit 1; done

docs: $(STAMP)
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/docs tests/first_hour tests/architecture/test_generated_files.py -q

PARTS ?=
bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(PARTS)

LOAD_SECONDS ?= 600
load: $(STAMP)
	$(BIN)/python benchmarks/load.py --seconds $(LOAD_SECONDS)

FUZZ_SECONDS ?= 120
FUZZ_MODELS ?= 850
FUZZ_TARGETS := json_messages json_passes raw_json passes pass_ids outputs samples compressed paths custom_losses
memory: $(STAMP)
	TINSMITH_RL_ITERATIONS=$(ITERATIONS) $(BIN)/python -m pytest -q tests/engine/test_memory_plan.py

fuzz: $(STAMP)
	$(BIN)/python -m pytest tests/security/test_fuzz_api.py tests/security/test_paths.py -q --hypothesis-profile=long
	TINSMITH_RANDOM_MODELS=$(FUZZ_MODELS) $(BIN)/python -m pytest tests/engine/families/test_random_settings.py -q
	for target in $(FUZZ_TARGETS); do \
		$(BIN)/python tests/security/fuzz_codecs.py $$target -max_total_time=$(FUZZ_SECONDS) -timeout=1 -rss_limit_mb=1024 || exit 1; \
	done

audit: $(STAMP)
	$(BIN)/python -m pytest tests/security/test_static.py -q -rs

chaos: $(STAMP)
	$(BIN)/python tools/chaos --seed $(SEED) --minutes $(MINUTES) --operations $(OPERATIONS) --store $(STORE) --storage $(STORAGE) --replicas $(REPLICAS) --engines $(ENGINES) --ranks $(RANKS) --cluster $(CLUSTER) --steps $(STEPS)

simulation: $(STAMP)
	$(BIN)/python tools/simulate.py --seed $(SEED) --operations $(OPERATIONS) --jobs $(JOBS)

CLUSTER_TESTS ?= tests/compat
cluster: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p tests.support.on_cluster $(CLUSTER_TESTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/engine/ray/autoscaling.py tests/engine/ray/losing_the_head.py

CLIENTS ?=
clients: $(STAMP)
	$(BIN)/python tools/client_programs.py $(CLIENTS)

vllm: $(STAMP)
	$(BIN)/python tools/vllm_exports.py

requirements: $(STAMP)
	$(BIN)/python tools/requirements.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
