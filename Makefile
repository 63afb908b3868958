PYTHON ?= python3
VENV   ?= .venv
# Where to get torch from, instead of pip's own index, whose Linux wheel brings 4 GB of CUDA libraries. For a CPU:
# make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
RUNS   ?= runs/quickstart
MINUTES ?= 25
GPU    ?= runs/gpu
TINY   ?= false
TRAIN  ?=
EVAL   ?=
FAULTS ?=
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODELS := baseline,diff,introspective
comma  := ,
PATHS  := $(subst $(comma), ,$(MODELS))
empty  :=
space  := $(empty) $(empty)
CORES  := $(shell getconf _NPROCESSORS_ONLN)
THREADS ?= $(shell expr \( $(CORES) - 1 \) / $(words $(PATHS)) + 1)
ALL    := $(subst $(space),$(comma),$(PATHS:%=$(RUNS)/%))

.PHONY: help quickstart test test-faults gpu lint clean

help:
	@echo "make quickstart   install, prepare data, train three stacks, evaluate, write $(RUNS)/report.html"
	@echo "make test         install, lint, and run the whole CPU test suite"
	@echo "make gpu          on a CUDA machine, with its own torch: kernel check, benches, MFU, short trainings, in MINUTES=25, into $(GPU); TINY=true tries it on a CPU"
	@echo "make test-faults  kills, damage, full disks, NaN and infinity: a table; FAULTS='kills=10 restarts=2' changes its size"
	@echo "make lint         ruff check and format check"
	@echo "make clean        remove the virtual environment and caches"
	@echo "TORCH_INDEX=https://download.pytorch.org/whl/cpu installs torch without CUDA; VENV=, RUNS=, MODELS= are paths and variants"

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements.txt))
	$(PIP) -r requirements.txt
	touch $@

# Without its dependencies: timm requires torchvision, which has no CPU build for the pinned torch. The tests load timm's layers alone.
$(VENV)/.tested: $(VENV)/.installed requirements-test.txt
	$(PIP) -r requirements-test.txt
	$(PIP) --no-deps timm==1.0.31
	touch $@

# Interrupted or repeated, it goes on where it was: prepared shards and trained runs are kept.
quickstart: $(VENV)/.installed
	$(BIN)/python -m data.prepare data=stdlib
	$(MAKE) --no-print-directory -j $(PATHS:%=train-%)
	$(BIN)/python -m eval.perplexity -m run=$(ALL)
	$(BIN)/python -m eval.needle -m run=$(ALL) $(EVAL)
	$(BIN)/python -m eval.attention_noise -m run=$(ALL) $(EVAL)
	$(BIN)/python -m eval.report runs=[$(ALL)] out=$(RUNS)/report.html

# All models at once, each on its share of the cores: small matrices leave a second thread idle half of the time.
train-%: SHELL := bash
train-%: .SHELLFLAGS := -o pipefail -c
train-%:
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python train.py experiment=quickstart model=$* run_dir=$(RUNS)/$* resume=true $(TRAIN) 2>&1 | sed -u 's/^/$*: /'

# By file, so that what a file's tests share is made once.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# With the machine's own Python and torch, which fit its driver: nothing is installed.
gpu:
	$(PYTHON) -m scripts.gpu minutes=$(MINUTES) out=$(GPU) tiny=$(TINY)

test-faults: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults $(FAULTS)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
