# Two commands matter: `make demo` and `make test`. Each builds .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= outputs/demo
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test parity lint bench clean help

help:
	@echo "make demo    set up .venv, turn a prompt into outputs/demo.mp4 and a contact sheet"
	@echo "make test    set up .venv, run the whole suite (no torch)"
	@echo "make parity  add CPU torch, diffusers, transformers; run the live comparisons"
	@echo "make lint    ruff and mypy"
	@echo "make bench   the tables of README (minutes)"

$(VENV)/.core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "videodiff needs Python >= 3.11; point make at one: make demo PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PIP) install -q -e . -c constraints.txt
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) install -q -e ".[test,lint]" -c constraints.txt
	@touch $@

$(VENV)/.parity: $(VENV)/.test
	$(PIP) install -q -e ".[test,parity]" -c constraints.txt
	@touch $@

demo: $(VENV)/.core
	$(BIN)/videodiff generate --output_path $(OUT).mp4 --contact_sheet

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not parity"

parity: $(VENV)/.parity
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m parity

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.core
	$(BIN)/python scripts/benchmark_attention.py
	$(BIN)/python scripts/benchmark_e2e.py

clean:
	rm -rf $(VENV) build dist *.egg-info
