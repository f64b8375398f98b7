# Every target stands alone: on a fresh machine it first makes .venv with everything that it needs.
#
#   make demo      train one model with gloo and with cgx at 4 bits, and compare
#   make test      lint, then the tests
#   make matrix    what CI runs besides: the Triton kernels for every target, type and width; FFCV, which has to be built;
#                  every width, type, number of ranks and launcher of which make test runs one or two
#   make torch-range  the unit tests and a chosen set of tests with real ranks on several releases of torch, each in an
#                  environment of its own, and a table of how they ended (TORCHES="2.6.0 newest"; gigabytes for CUDA)
#   make lint      formatting, lint and types
#   make bench     time the allreduce against gloo, the kernels against memcpy and other quantizers, whole trainings against
#                  gloo, fp16 and PowerSGD; watch memory; what bits that choose themselves save; hold `cgx plan` against it
#                  all; plots and tables of docs/benchmarks.md. Hours, and as root (ACCURACY_DATA: the folder of data)
#   make faults    every fault on every transport, and on gloo: the table of docs/reliability.md
#   make accuracy  train with and without compression, five seeds each, and compare (ACCURACY_DATA: the folder of data)
#   make soak      20 minutes of mixed load, every result checked, and watched for what grows (SOAK_MINUTES)
#   make sanitize  the native tests under sanitizers, valgrind and emulators of other processors
#   make fuzz      every target of tests/fuzz for FUZZ_S seconds, guided by coverage where atheris can be had; then random
#                  calls and DDP models on cgx and on gloo, FUZZ_CALLS and FUZZ_MODELS for each kind of group
#   make model     check the model of the shared-memory protocol with spin, and that it finds mistakes put in on purpose
#   make site      the pages of docs/ as a site, into site/; a link that leads nowhere is an error
#   make site-check  look at every page of it in a browser (Chromium, which has to be there); pictures in build/screenshots
#   make native    the native library into the source tree, for work with PYTHONPATH=src
#   make dist      the source distribution and the wheels of this machine, checked, into dist
#   make clean     remove what make has made

# Dozens of processes import torch, which takes 6 s of processor time where they may not keep its modules compiled, and 3 s
# where they may. Images of containers often forbid it; it is .venv that they are kept in.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# One release of torch that all of us test with; `pip install` itself takes any from 2.6 on.
TORCH ?= torch==2.13.0
# The oldest that pyproject.toml allows, one between, the one above, and what `pip install torch` brings.
TORCHES ?= 2.6.0 2.11.0 2.13.0 newest
TEST_LIMIT_S ?= 3600
PYTEST_ARGS ?=
ACCURACY_DATA ?= ../shared/data
SOAK_MINUTES ?= 20

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FFCV := $(VENV)/.ffcv-installed
# Tests run side by side, but for those that are marked `alone`; the tests of one file share what is slow to make. Exit
# code 5: of PYTEST_ARGS' tests, none is there.
WORKERS ?= 2
BY_FILE := --dist loadfile --no-loadscope-reorder # in the order of tests/conftest.py
PYTEST = pytest_in() { timeout --foreground --kill-after=30 $(TEST_LIMIT_S) $(BIN)/python -m pytest "$$@" || test $$? = 5; }; pytest_in
# Today's folder for this machine. Found out once, and only by targets that store something.
RESULTS = $(eval RESULTS := $(shell $(BIN)/python benchmarks/results.py))$(RESULTS)
FUZZ_S ?= 30
FUZZ_CALLS ?= 5000
FUZZ_MODELS ?= 200
BENCH := $(BIN)/cgx bench allreduce --against gloo --bucket-size 1024
BENCH_KERNELS := $(BIN)/cgx bench kernels --bucket-size 1024
SOURCES := pyproject.toml CMakeLists.txt $(wildcard README.md) \
	$(shell find src csrc -type d -not -name __pycache__) \
	$(shell find src csrc -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name py.typed)

.PHONY: demo test matrix torch-range lint bench faults accuracy soak sanitize fuzz model site site-check native install dist clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint
	$(PYTEST) -n $(WORKERS) $(BY_FILE) --only together -m "not matrix" tests $(PYTEST_ARGS)
	$(PYTEST) --only alone -m "not matrix" tests $(PYTEST_ARGS)

matrix: $(FFCV)
	$(PYTEST) -n $(WORKERS) $(BY_FILE) --only together -m matrix tests $(PYTEST_ARGS)
	$(PYTEST) --only alone -m matrix tests $(PYTEST_ARGS)

torch-range:
	"$(PYTHON)" .ci/torch-range $(TORCHES)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-cache
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run -Werror

bench: $(STAMP)
	$(BENCH) --nproc 2 --bits 4 --sizes 64K,4M,25M,64M --busy --json $(RESULTS)/allreduce-2-ranks-4-bits.json \
		--plot docs/allreduce.png
	$(BENCH) --nproc 4 --bits 4 --sizes 4M,25M,64M --json $(RESULTS)/allreduce-4-ranks-4-bits.json
	$(BENCH) --nproc 2 --bits 32 --sizes 4,1K,64K,1M,4M,25M,256M --json $(RESULTS)/allreduce-2-ranks-exact.json
	$(BIN)/python benchmarks/exact_collectives.py --json $(RESULTS)/exact-collectives-2-ranks.json
	$(BENCH) --nodes 2 --nproc 1 --rate 1gbit --sizes 64M,25M,4M --busy --json $(RESULTS)/nodes-2x1-1gbit.json
	setpriv --bounding-set -sys_nice --inh-caps -sys_nice $(BENCH) --nodes 2 --nproc 1 --rate 1gbit --sizes 25M --busy \
		--json $(RESULTS)/nodes-2x1-1gbit-without-priority.json
	$(BENCH) --nodes 2 --nproc 1 --rate 100mbit --sizes 4M --json $(RESULTS)/nodes-2x1-100mbit.json
	$(BENCH) --nodes 2 --nproc 1 --rate 10gbit --sizes 64M,25M,4M,1M,64K,4K,1K,64 \
		--json $(RESULTS)/nodes-2x1-10gbit.json
	$(BENCH) --nodes 2 --nproc 2 --rate 1gbit --sizes 64M --json $(RESULTS)/nodes-2x2-1gbit.json
	CGX_INTRA_BROADCAST=0 $(BENCH) --nodes 2 --nproc 2 --rate 1gbit --sizes 64M \
		--json $(RESULTS)/nodes-2x2-1gbit-no-broadcast.json
	$(BIN)/python benchmarks/mpi_link.py --mpich $(VENV)/mpich/bin/mpiexec --open-mpi $(BIN)/mpirun --json $(RESULTS)/mpi-link-1gbit.json
	$(BIN)/python benchmarks/hook.py --json $(RESULTS)/hook.json
	$(BIN)/python benchmarks/adaptive.py --data $(ACCURACY_DATA) --json $(RESULTS)/adaptive.json
	$(BIN)/python benchmarks/adaptive_speed.py --json $(RESULTS)/adaptive-speed.json
	$(BIN)/python benchmarks/adaptive_cost.py --json $(RESULTS)/adaptive-cost.json
	$(BIN)/python benchmarks/memory.py --json $(RESULTS)/memory.json
	$(BIN)/python benchmarks/fsdp_speed.py
	$(BIN)/python benchmarks/fsdp_memory.py
	$(BIN)/cgx bench train --model gpt --nodes 2 --rate 1gbit --against gloo,fp16,powersgd --bits 4,adaptive --batch 15 \
		--bucket-mb 36 --rounds 14 --steps 3 --data $(ACCURACY_DATA)/tinyshakespeare.txt --json $(RESULTS)/speedup.json
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/plan_runs.py
	$(BIN)/python benchmarks/plan_validation.py --doc docs/plan-validation.md
	$(BIN)/python benchmarks/plan_curves.py
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check pypiquant
	$(BENCH_KERNELS) --json $(RESULTS)/kernels-best-level.json --plot docs/kernels.png
	$(BENCH_KERNELS) --sizes 64M --dtypes float32 --threads 1,2 --json $(RESULTS)/kernels-threads.json
	$(BIN)/python benchmarks/results.py $(RESULTS)/*.json

faults: $(STAMP)
	$(BIN)/python benchmarks/detector_cost.py --json $(RESULTS)/detector-cost.json --doc docs/reliability.md
	$(BIN)/python -m tests.faults --json $(RESULTS)/faults.json
	$(BIN)/python benchmarks/faults.py $(RESULTS)/faults.json --doc docs/reliability.md

# What the newest accuracy.json has is not run again: remove it to begin anew, which takes hours on two cores.
accuracy: $(STAMP)
	$(BIN)/python benchmarks/accuracy.py --data $(ACCURACY_DATA) --doc docs/benchmarks.md --plot docs/accuracy.png
	$(BIN)/python benchmarks/fsdp_accuracy.py --data $(ACCURACY_DATA) --doc docs/fsdp.md

soak: $(STAMP)
	$(BIN)/python benchmarks/soak.py --minutes $(SOAK_MINUTES) --json $(RESULTS)/soak.json

# Needs neither Python nor torch. PARTS="address valgrind" runs those alone; tools/sanitize names them all.
sanitize:
	@sh tools/sanitize $(PARTS)

fuzz: $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) --json $(RESULTS)/fuzz.json
	$(BIN)/python -m tests.fuzz.against_gloo --calls $(FUZZ_CALLS) --models $(FUZZ_MODELS) \
		--json $(RESULTS)/against-gloo.json

# Needs neither Python nor torch.
model:
	@sh tools/model

# The variable leaves out what the theme's authors say about the next MkDocs.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

site-check: site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	$(PYTEST) tests/site
	$(BIN)/python tests/site/check_site.py

native: $(STAMP)
	$(BIN)/cmake --install build/pip --prefix src

install: $(STAMP)

# Needs no torch.
dist:
	@sh tools/system-packages "$(PYTHON)"
	@sh tools/dist "$(PYTHON)"

# A folder in SOURCES is newer when a file was added to it or removed. uv fetches nearly everything, faster
# than pip, and pip the rest: all of it where uv cannot be had. pip always packs our files anew, but compiles only what
# has changed, because build/pip stays. MPICH brings an mpirun too, so it gets a folder of its own.
$(STAMP): $(SOURCES)
	@sh tools/system-packages "$(PYTHON)"
	@echo "Installing torch, the tools and this package into $(VENV); the first time takes some minutes."
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@sh tools/uv-install $(BIN)/python "$(TORCH)" cmake ninja --requirements pyproject.toml --extra dev || true
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" "scikit-build-core>=1.0" cmake ninja \
		"pip>=22.3" # which can install into another environment
	$(BIN)/python -m pip uninstall --quiet --quiet --yes pytorch-cgx # our name before 1.0, with the same files
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--config-settings=build-dir=build/pip ".[dev]"
	test -x $(VENV)/mpich/bin/mpiexec || sh tools/uv-install $(BIN)/python --prefix $(VENV)/mpich mpich || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --prefix $(VENV)/mpich mpich
	touch $@

# Where FFCV cannot be had, this says why, and its test is skipped.
$(FFCV): tools/ffcv-packages | $(STAMP)
	@if sh tools/ffcv-packages $(BIN)/python; then touch $@; else test $$? = 77; fi

clean:
	rm -rf $(VENV) build dist site src/torch_cgx/_native/*.so* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
