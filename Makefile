# Everything lives in .venv of this folder; nothing else of the machine is touched but by `make system`.
#
#   make demo TORCH=torch==2.13.0+cpu PIP_ARGS="..."   choose the build of torch, and where pip looks for it
#   make venv PYTHON=python3.12                        choose the Python

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv system horovod demo test test-long test-all test-frameworks test-containers test-kubelet test-gpu gpu-wheels test-versions spec lint size bench bench-survival soak fuzz release bump clean

PYTHON ?=
TORCH ?=
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
FUZZ_ARGS ?=
SPEC_ARGS ?=
VERSIONS ?=
BIN := .venv/bin

# Another environment may be active: it is neither used nor changed.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
# Tests start thousands of launchers from this tree, each of which would compile it anew.
unexport PYTHONDONTWRITEBYTECODE
export PYTHON TORCH PIP_ARGS

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 # /p' Makefile | column -t -s '#' 2>/dev/null || grep -E '^[a-z-]+:.*##' Makefile

venv: .venv/.ready ## create .venv with everything for development

.venv/.ready: pyproject.toml constraints.txt tests/setup/venv.sh
	@tests/setup/venv.sh
	@touch $@

system: ## install the system packages that tests use, or say which are missing
	@tests/setup/system_packages.sh

demo: venv ## train a small language model on 2 rehearsed pods with 2 processes each
	CUDA_VISIBLE_DEVICES= $(BIN)/trainer-launch rehearse --nodes 2 --nproc-per-node 2 -- docker/examples/train_charlm.py

horovod: system venv ## build Horovod for the tests, once; it is kept in the user's cache
	@tests/setup/horovod.sh

# Most tests wait for processes, so several files of tests run at a time; PYTEST_ARGS=-n0 is one after the other.
# tests/conftest.py has the order: quick ones first.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder --max-worker-restart 2
PYTEST := $(BIN)/python -m pytest -n 5 $(SIDE_BY_SIDE)

# mypy leaves a CPU idle, on which pytest compiles all tests once: else each of its processes would.
test: system venv ## check style and types, then run all tests except the long ones; 7 to 10 minutes on 2 CPUs
	@nice $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 &
	@$(MAKE) --no-print-directory lint
	$(PYTEST) -m "not long and not frameworks and not containers and not kubelet and not gpu" $(PYTEST_ARGS)

# Building Horovod takes minutes, once. It runs beside the tests, and tests that need it wait for it.
test-long: system venv ## run the long tests that `make test` leaves out
	@nice tests/setup/horovod.sh </dev/null >/dev/null 2>&1 &
	$(PYTEST) -m "long and not frameworks and not containers and not kubelet and not gpu" $(PYTEST_ARGS)

test-all: test test-long ## run both

test-frameworks: venv ## run the tests with TensorFlow, JAX and other frameworks, each installed once, in the user's cache
	@PYTHON=$(BIN)/python tests/setup/frameworks.sh </dev/null || [ $$? = 3 ]
	$(PYTEST) -n 2 -m frameworks tests/frameworks $(PYTEST_ARGS)

test-containers: venv ## as root: run the tests in containers of images built from this tree, with podman
	@tests/setup/system_packages.sh podman runc netavark aardvark-dns iproute2 iptables catatonit debootstrap
	@PYTHON=$(BIN)/python tests/setup/images.sh </dev/null || { [ $$? = 3 ] && [ "$$CI" != true ]; }
	$(PYTEST) -n 2 -m containers tests/containers $(PYTEST_ARGS)

# One cluster, so one test at a time.
test-kubelet: venv ## as root: build Kubernetes once, in the user's cache, and run the tests on a real cluster of one node
	@tests/setup/system_packages.sh podman runc netavark aardvark-dns iproute2 iptables catatonit debootstrap containerd \
		containernetworking-plugins etcd-server dnsmasq-base conntrack socat kmod openssl \
		golang-go golang-github-modern-go-reflect2-dev dpkg-dev make rsync
	@PYTHON=$(BIN)/python tests/setup/images.sh </dev/null || { [ $$? = 3 ] && [ "$$CI" != true ]; }
	@tests/setup/kubernetes.sh </dev/null || { [ $$? = 3 ] && [ "$$CI" != true ]; }
	$(BIN)/python -m pytest -n 0 -m kubelet tests/kubelet $(PYTEST_ARGS)

# A machine with GPUs may have no network and a torch of its own: .venv is used if it is there, and never made here.
test-gpu: ## with an NVIDIA GPU, without network: run GPU checks and jobs over NCCL on it; the result is build/gpu.xml
	@tests/setup/gpu.sh test $(PYTEST_ARGS)

gpu-wheels: ## with network: pack in .gpu-wheels what `make test-gpu` needs besides torch; GPU_PYTHON=3.12
	@tests/setup/gpu.sh pack $(GPU_PYTHON)

# A developer's .venv has one Python and one torch; these are the others that the package supports.
test-versions: system venv ## run the main tests with other versions of torch, Python, MPI and ssh: VERSIONS="torch-2.4 mpi-5.0"
	@tests/setup/system_packages.sh debootstrap
	@$(BIN)/python -m tests.release.versions $(VERSIONS)

spec: venv ## print the tests as sentences: what this program does, folder by folder; SPEC_ARGS="mpi ssh"
	@$(BIN)/python tests/spec.py $(SPEC_ARGS)

lint: venv ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

size: venv ## print how large the project is, beside 0.2 and the goals of 0.3
	@$(BIN)/python -m tests.sizes

bench: venv ## measure this project and its peers in turn, for an hour; write benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-survival: venv ## as root, for hours: what each fault costs a job of three pods, beside its peers
	$(BIN)/python -m benchmarks --only survival $(BENCH_ARGS)

# The ledger is written as things happen: `.venv/bin/python -m tests.soak.report soak` sums it up at any time.
soak: venv ## as root, for two hours: random faults on 6 pods, and a ledger of what has to hold; SOAK_ARGS="--minutes 20"
	$(BIN)/python -m tests.soak.soak soak $(SOAK_ARGS)
	$(BIN)/python -m tests.soak.report soak

# atheris is not in .venv before: it has no wheels for the newest Pythons.
fuzz: venv ## fuzz every parser, guided by coverage, a minute each; FUZZ_ARGS="--seconds 600 pod hosts"
	@$(BIN)/python -c "import atheris" 2>/dev/null || \
		$(BIN)/python -m pip install -qq --constraint constraints.txt $(PIP_ARGS) atheris
	$(BIN)/python -m tests.fuzz.fuzz $(FUZZ_ARGS)

# tests/release/test_version.py holds together what `bump` changes. `release` publishes nothing.
bump: ## write the number of the next version where it stands: VERSION=0.2.0
	@[[ "$(VERSION)" =~ ^[0-9]+\.[0-9]+\.[0-9]+$$ ]] || { echo "bump: expected VERSION=N.N.N" >&2; exit 2; }
	@grep -q '^## $(VERSION) (unreleased)$$' CHANGELOG.md || { echo "bump: CHANGELOG.md has no unreleased $(VERSION)" >&2; exit 2; }
	sed -i 's/^__version__ = .*/__version__ = "$(VERSION)"/' trainer_launch/__init__.py
	sed -i 's/^ARG VERSION=.*/ARG VERSION=$(VERSION)/' docker/Dockerfile
	sed -i -E 's/(newTag: )[0-9.]+/\1$(VERSION)/' docker/kubernetes/kustomization.yaml docker/kubernetes/examples/*/kustomization.yaml
	sed -i "s/^## $(VERSION) (unreleased)$$/## [$(VERSION)] - $$(date -u +%F)/" CHANGELOG.md

release: venv ## make sdist, wheel, SBOM and checksums of the last commit in dist/, ready to publish
	@$(BIN)/python -m tests.release.release dist

clean: ## remove .venv and what tools left behind
	rm -rf .venv .gpu-wheels build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
