# make demo   the whole workflow over a small real model, on the CPU
# make test   all tests that need no GPU
# make test-cluster   those on a real Slurm, which is installed for them where this is root on Debian
# make test-containers   those with a real Apptainer, in images made for them; it is installed for them where this is root on Debian
# make images   the container images of envs/, with Apptainer; OPTIONS="..." for scripts/images.py
# make test-exports   the exports by the trainers' own loaders, in an environment of their own
# make lint   style of code and rules
# Each sets up .venv by itself. Another Python than python3: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_MODEL := models/SmolLM2-135M-Instruct

export PATH := $(BIN):$(PATH)

.PHONY: demo test test-cluster test-containers test-exports images lint install
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	snakemake --cores all

test: $(INSTALLED) $(DEMO_MODEL)/config.json
	python tests/fetch_tokenizers.py
	python -m pytest tests/unit tests/workflow tests/server
	$(MAKE) test-cluster
	$(MAKE) test-containers
	$(MAKE) test-exports

# Without Slurm and without the right to install it, these tests are skipped by name.
test-cluster: $(INSTALLED) $(DEMO_MODEL)/config.json
	bash tests/cluster/install.sh
	python -m pytest tests/cluster

# Without Apptainer and without the right to install it, these tests are skipped by name.
test-containers: $(INSTALLED) $(DEMO_MODEL)/config.json
	bash tests/containers/install.sh
	python -m pytest tests/containers

images: $(INSTALLED)
	python scripts/images.py $(OPTIONS)

test-exports: $(INSTALLED)
	bash tests/exports/make_environment.sh $(VENV) .venv-trainers
	.venv-trainers/bin/python -m pytest tests/exports

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules
	snakemake --lint

install: $(INSTALLED)

# The lock names every package, so pip need not look for what they need; the project itself is installed as it lies here.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found %s: name one with make PYTHON=..." % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(DEMO_MODEL)/config.json: | $(INSTALLED)
	python scripts/prepare_demo_model.py --output $(DEMO_MODEL)
