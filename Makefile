# The commands of this project. `make help` lists them. Longer ones are scripts in .ci.
PYTHON   ?= $(eval PYTHON := $(shell for p in python3.11 python3.12 python3.13 python3.10 python3; do $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done))$(PYTHON)
VENV     := .venv
DOCS     := .venv-docs
RELEASE  := .venv-release
NEWEST   := .venv-newest
PY       := $(VENV)/bin/python
BIN      := build/bin
NVCC     := build/nvcc/nvidia/cu13/bin/nvcc
FUZZTIME ?= 10s
SECONDS   = 600
JOBS     ?= 3
BUILT    ?= build
PYTEST    = $(PY) -m pytest -n $(JOBS) --dist loadgroup

export GOEXPERIMENT ?= simd
# The flags of the library's build, so that tests and tools share its compiled packages.
ifndef GOFLAGS
GOFLAGS := $(shell $(PYTHON) setup.py goflags)
endif
export GOFLAGS FUZZTIME JOBS PY BIN SHORT ASAN_TESTS
# Most tests are programs: bytecode of torch and other libraries is kept for the next one.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: $(shell awk -F: '/^[a-z0-9]+:/ {print $$1}' Makefile)

help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.ready ## make .venv with everything that the tests need

$(VENV)/.ready: requirements/test.txt requirements/transformers5.txt
	@test -n "$(PYTHON)" || { echo "overwire needs Python 3.10 to 3.13 on PATH"; exit 1; }
	PYTHON=$(PYTHON) .ci/install venv $(VENV) test
	PYTHON=$(PY) .ci/install transformers5 $(VENV)/transformers5
	@touch $@

$(DOCS)/.ready $(RELEASE)/.ready $(NEWEST)/.ready: .venv-%/.ready: requirements/%.txt
	PYTHON=$(PYTHON) .ci/install venv .venv-$* $*
	@touch $@

build: venv ## compile the engine and install the package into .venv (editable)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -e .
engine: # only the library
	$(PYTHON) setup.py ext

gen: venv $(BIN)/gopy ## rewrite generated files: the glue in gosrc/bind/core, and the engine's tables in Python
	$(PY) gosrc/bind/gen.py $(BIN)
	$(PY) gosrc/bind/gen_python.py

$(BIN)/gopy: go.mod
$(BIN)/versitygw: $(wildcard tests/s3server/*)
$(BIN)/gopy $(BIN)/staticcheck $(BIN)/versitygw:
	.ci/install $(notdir $@) $(BIN)
	@touch $@

test: FUZZTIME = 2s
test: SITE = $(shell $(PYTHON) -c 'import sys; print("docs" if sys.version_info >= (3, 11) else "")')  # Sphinx needs 3.11
test: ## run everything that must pass: lint, Go and Python tests, fuzzing, the wheel, AddressSanitizer, the site
	@for step in "packages compiled pylint race asan $(BIN)/versitygw $(SITE)" "collected wheel fuzz" suite; do \
		start=$$(date +%s); \
		$(MAKE) --no-print-directory -j3 -O BUILT= SHORT=-short $$step || { echo "make $$step failed"; exit 1; }; \
		echo "-- $$step: $$(($$(date +%s) - start)) s"; \
	done

quick: build golint ## run the inner loop, under two minutes on two cores: gofmt, vet, ruff, Go tests, light Python tests
	$(PY) -m ruff check --quiet .
	@.ci/check short
	$(PYTEST) -m "not slow and not heavy"
compiled: # one after the other, because each uses what the previous one has compiled
	@for step in engine gotest fakegpu static; do $(MAKE) --no-print-directory $$step || exit 1; done
packages: ; @.ci/packages

more: build packages lint $(BIN)/gopy $(BIN)/versitygw ## run everything that `make test` leaves out: Go's S3 tests, slow tests, long races
	@.ci/check more && .ci/fuzz
	@$(MAKE) --no-print-directory soak SECONDS=120
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory fakegpu fakepy aarch64
	wheels/pythons.sh $$(uname -m) 3.14 3.15 || true
	@$(MAKE) --no-print-directory wheel

aarch64: venv packages $(BIN)/versitygw ## test Linux aarch64 under qemu-user, for hours: Go tests, the wheel, Python tests of the wheel
	PYTHON="$(CURDIR)/$(PY)" wheels/aarch64.sh all
lint: golint pylint static ## run gofmt, vet, staticcheck, ruff, mypy
	@.ci/check purego
static: $(BIN)/staticcheck
fakepy: build ## run Python tests of GPU codecs, on an engine with the fake driver
asan: venv $(BUILT) ## run Python tests of the engine under AddressSanitizer
gotest: ## run Go tests and vet, with SIMD, and the decoders also without; `make fakegpu` tests the GPU engine
race: ## run Go tests under the race detector
fakegpu: ## run tests of device/cuda on the fake driver, which runs the kernels on the CPU
gofmt golint gotest race static fakegpu fakepy asan:
	@.ci/check $@
counts: ## lower the ceilings of lines, names and writing habits; WHY="a reason" also raises those of lines and names
	$(PY) tests/house/prose.py --write && $(PY) tests/house/counts.py --write $(if $(WHY),--why "$(WHY)")

pylint: venv
	$(PY) -m ruff check --quiet .
	$(PY) -m mypy --strict python/overwire setup.py wheels docs/_site/docstrings.py docs/_site/checksite.py
fuzz: ## run every fuzz target for FUZZTIME (10s), five at a time
	.ci/fuzz
pytest: $(BUILT) ## run the Python tests
	$(PYTEST)
collected: build # compiles the tests' bytecode once for all workers of the suite, which begin together
	@mkdir -p build; $(PY) -m pytest --collect-only -m "not slow" >build/collected || { cat build/collected; exit 1; }
suite: # after wheel, because it inspects the wheel's files
	OVERWIRE_TEST_DIST="$(CURDIR)/dist" $(PYTEST) -m "not slow"
newest: build $(NEWEST)/.ready ## run the Python tests with the newest torch, transformers and others: see requirements/newest.txt
	$(NEWEST)/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	OVERWIRE_TEST_TRANSFORMERS5=$$($(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		$(NEWEST)/bin/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow"
wheel: venv ## build the wheel and the sdist into dist/, audit them, and import the wheel in every Python here
	$(PY) wheels/build.py dist
	$(PY) wheels/check.py dist/*.whl
soak: build ## run loops with concurrency and faults over the public interface: SECONDS=600 SEED=... ONLY=NAME
	$(PY) tests/soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))
demo: build ## compress real weights, load them back and compare them, with figures
	$(PY) examples/demo.py
plots: $(DOCS)/.ready ## draw docs/plots/*.svg from docs/plots/figures.json
	$(DOCS)/bin/python docs/plots/draw.py
bench: build ## measure this machine and its limits, the binding, and loads over HTTP
	$(PY) -m overwire bench
	$(PY) bench/bench_net.py
	$(PY) bench/bench_binding.py
docs: $(DOCS)/.ready ## build the site in build/docs/html from docs/ and the docstrings; needs no network once installed
	$(DOCS)/bin/python -m sphinx -q -W --keep-going -E -c docs -d build/docs/doctrees . build/docs/html
	$(DOCS)/bin/python docs/_site/checksite.py build/docs/html
release: venv $(RELEASE)/.ready ## build and check in dist/ what a release uploads, and upload nothing; REHEARSE=1 takes any commit
	$(PY) wheels/release.py $(if $(REHEARSE),--rehearse) --twine $(RELEASE)/bin/twine dist
reproduce: venv ## build the commit in two new folders, once from scratch, and compare them and dist/
	$(PY) wheels/release.py --reproduce dist
clean: ## remove everything built and installed
	rm -rf $(VENV) $(DOCS) $(RELEASE) $(NEWEST) build dist python/overwire/_core.abi3.so

build/%/.ready: requirements/engines.txt requirements/quantisers.txt .ci/install $(VENV)/.ready
	PYTHON=$(PY) .ci/install $* build/$*
	@touch $@
engines: build build/engines/.ready ## load tiny models with real vLLM and SGLang through overwire, and compare every byte
engines33: build build/engines/.ready build/engines33/.ready ## do the same with vLLM 0.33, from its source archive
quantisers: build build/quantisers/.ready ## load models of GPTQ, AWQ and other quantisers in transformers, patched and not, and compare every byte
ray: build $(BIN)/versitygw ## load models through a real Ray cluster of several nodes, with faults
engines engines33 quantisers ray:
	@.ci/check $@
kernels: $(NVCC) ## recompile cuda/built/*.fatbin with the pinned compiler, byte for byte
	sh cuda/built/build.sh "$(CURDIR)/$(NVCC)"

$(NVCC):
	$(PYTHON) -m pip install -q --disable-pip-version-check --target build/nvcc "cuda-toolkit[nvcc,cudart]==13.0.*"
gpubench: build ## on a machine with a GPU: run its tests and the memory checkers, and measure every figure
	PYTHON=$(PY) bench/gpu/device_run.sh
