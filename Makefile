# Two commands: `make demo` runs the main job, `make test` passes the tests. Each sets up what it
# needs; the second time it is quick.

PYTHON ?= python3
BIN := .venv/bin
# Storage of the target's weights: int8, the fastest on a CPU, or same for the exact float32 model.
WEIGHTS ?= int8
BUNDLE := demo/bundle-$(WEIGHTS)
TARGET := demo/cache/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPT ?= Write a short Python function that checks whether a number is prime, and explain it.

# As it is, through the environment: neither make nor the shell interprets what it holds.
override export PROMPT := $(value PROMPT)

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(BUNDLE)/manifest.json
	$(BIN)/eagle3 run "$(BUNDLE)" --compare --max-new-tokens 256 -- "$$PROMPT"
	@$(BIN)/eagle3 inspect "$(BUNDLE)" | grep -E '^(plan|quality) '

test: .venv/installed .venv-runtime/installed $(TARGET) lint
	EAGLE3_RUNTIME_VENV="$(CURDIR)/.venv-runtime" OMP_NUM_THREADS=1 SYMPY_CACHE_SIZE=None \
		$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/pip || "$(PYTHON)" -m venv --clear .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,dev,tensorrt-rtx]'
	$(BIN)/pip install --quiet --no-deps 'tensorrt-rtx-cu13==1.7.1.116'
	touch "$@"

# What a service installs: the runtime alone, without torch or transformers. It comes after the
# other one, as two installs of the same checkout at once would write the same files.
.venv-runtime/installed: pyproject.toml constraints.txt | .venv/installed
	test -x .venv-runtime/bin/pip || "$(PYTHON)" -m venv --clear .venv-runtime
	.venv-runtime/bin/pip install --quiet -c constraints.txt -e '.[cpu]'
	touch "$@"

$(TARGET): demo/fetch_target.py | .venv/installed
	$(BIN)/python demo/fetch_target.py "$(@D)"
	touch "$@"

# int8 weights and this tree: measured, see docs/decisions.md.
$(BUNDLE)/manifest.json: $(TARGET) $(wildcard demo/head/*) $(shell find export -name "*.py") plans/plan.py plans/tree_plan.py
	$(BIN)/eagle3 export --target "$(TARGET)" --draft demo/head -o "$(BUNDLE)" --force \
		--weights "$(WEIGHTS)" --draft-weights int8 --draft-top-k 3 --draft-depth 3 --num-draft-tokens 5

clean:
	rm -rf .venv .venv-runtime demo/cache demo/bundle-int8 demo/bundle-same build *.egg-info .mypy_cache .ruff_cache .pytest_cache
