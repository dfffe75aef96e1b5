# Every target uses the Python of the active environment: `make test PYTHON=python3.12` takes another.
PYTHON ?= python
# Two processes of one thread each: tests are small, and torch's own threads would only compete. The tests
# of a class or a module stay in one process, for what they share is slow to make.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadscope

DEMO_DRAFTER := {"method": "draft_model", "model": "smollm2-135m-instruct", \
  "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}

.PHONY: demo test test-full test-gpu static check

demo:
	@echo "SmolLM2-135M-Instruct on two ranks; no smaller drafter of its family is at hand, so it drafts"
	@echo "with the same weights: watch the data flow and the acceptance, not the speed."
	$(PYTHON) -m specreg generate --target smollm2-135m-instruct -tp 2 \
	  --enable-batch-sharded-sampling --temperature 0.8 --seed 1 --max-tokens 48 \
	  --max-model-len 256 --prompts examples/prompts.jsonl \
	  --speculative-config '$(DEMO_DRAFTER)'

test:
	$(PYTEST) -m "not gpu and not slow"

test-full:
	$(PYTEST) -m "not gpu"

test-gpu:
	$(PYTHON) -m pytest -m gpu

static:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	lint-imports

check: static test
