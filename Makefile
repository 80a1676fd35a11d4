# Each target first sets up what it needs in .venv, which is quick when nothing has changed; see .ci/setup.sh.
# ARGS=... is passed on: make test ARGS="-k layers"

.PHONY: help demo test test-latest test-oldest lint typecheck docs

help:
	@echo "make demo         train a GPT twice, plain and under a byte budget, and compare"
	@echo "make test         run the tests"
	@echo "make test-latest  install with the newest releases, PyTorch among them, and test that"
	@echo "make test-oldest  the same with the oldest releases that pyproject.toml allows"
	@echo "make lint         check style"
	@echo "make typecheck    check types"
	@echo "make docs         build the site of the documents into site/"

demo:
	@bash -c 'source .ci/setup.sh demo && exec "$$python" examples/gpt.py $(ARGS)'

test:
	@.ci/test.sh $(ARGS)

test-latest:
	@.ci/test-latest.sh $(ARGS)

test-oldest:
	@.ci/test-oldest.sh $(ARGS)

lint:
	@.ci/lint.sh

typecheck:
	@.ci/typecheck.sh

docs:
	@bash -c 'source .ci/setup.sh all && NO_MKDOCS_2_WARNING=1 exec "$$python" -m mkdocs build $(ARGS)'
