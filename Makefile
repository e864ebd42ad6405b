# Set-up is repeatable: versions come from constraints.txt. torch goes first, so that nothing else chooses it.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_INSTALL = -m pip install --quiet --constraint constraints.txt
ARGS ?= -m 'not notebook'
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help demo test notebooks docs format constraints clean

help:
	@echo "make demo         install into .venv, fit and predict the shipped real cells, write demo/"
	@echo "make test         install into .venv-test; format, lint, types, contracts, tests"
	@echo "make notebooks    run the notebooks in place; some: NAMES='01 03'"
	@echo "make docs         build the documentation into docs/_build"
	@echo "make format       format and sort imports"
	@echo "make constraints  choose versions anew and write constraints.txt"

# A virtual environment with torch from the constraints.
.venv/torch .venv-test/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) $(TORCH)
	@touch $@

.venv/ready: .venv/torch pyproject.toml
	.venv/bin/python $(PIP_INSTALL) --editable .
	@touch $@

.venv-test/ready: .venv-test/torch pyproject.toml
	.venv-test/bin/python $(PIP_INSTALL) --editable '.[test]'
	@touch $@

demo: .venv/ready
	.venv/bin/perturbdiff demo --out demo

test: .venv-test/ready
	.venv-test/bin/ruff format --check .
	.venv-test/bin/ruff check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv-test/bin/python -m pytest $(ARGS)

notebooks: .venv-test/ready
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} .venv-test/bin/python -m notebooks.execute $(NAMES)

docs: .venv-test/ready
	.venv-test/bin/python -m sphinx -W -n --keep-going docs docs/_build

format: .venv-test/ready
	.venv-test/bin/ruff check --fix .
	.venv-test/bin/ruff format .

constraints:
	rm -rf .venv-constraints
	$(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install --quiet $(TORCH)
	.venv-constraints/bin/python -m pip install --quiet '.[test]'
	{ echo "# Versions that work together on Python 3.11 and later. Written by: make constraints"; \
	  .venv-constraints/bin/python -m pip freeze --exclude perturbdiff | sed 's/+[a-z0-9.]*$$//'; } > constraints.txt
	rm -rf .venv-constraints

clean:
	rm -rf .venv .venv-test .venv-constraints build dist demo docs/_build docs/generated *.egg-info
