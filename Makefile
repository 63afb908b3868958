PYTHON ?= python3
VENV   ?= .venv
RUNS   ?= runs/quickstart
TRAIN  ?=
EVAL   ?=
BIN    := $(VENV)/bin
MODELS := baseline,diff,introspective
comma  := ,
PATHS  := $(subst $(comma), ,$(MODELS))
empty  :=
space  := $(empty) $(empty)
ALL    := $(subst $(space),$(comma),$(PATHS:%=$(RUNS)/%))

.PHONY: help quickstart test lint clean

help:
	@echo "make quickstart   install, prepare data, train three stacks, evaluate, write $(RUNS)/report.html"
	@echo "make test         install and run the whole CPU test suite"
	@echo "make lint         ruff check and format check"

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# timm wants torchvision, whose CPU build the pinned torch has none of; the tests load timm's layers alone.
$(VENV)/.tested: $(VENV)/.installed requirements-test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps timm==1.0.31
	touch $@

# Interrupted or repeated, it goes on where it was: prepared shards and trained runs are kept.
quickstart: $(VENV)/.installed
	$(BIN)/python -m data.prepare data=stdlib
	$(BIN)/python train.py -m experiment=quickstart model=$(MODELS) runs=$(RUNS) resume=true $(TRAIN)
	$(BIN)/python -m eval.perplexity -m run=$(ALL)
	$(BIN)/python -m eval.needle -m run=$(ALL) $(EVAL)
	$(BIN)/python -m eval.attention_noise -m run=$(ALL) $(EVAL)
	$(BIN)/python -m eval.report runs=[$(ALL)] out=$(RUNS)/report.html

test: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
