#!/bin/sh
# Tests overwire for Linux aarch64 on an x86-64 machine, under qemu-user: `make aarch64`.
#
#   wheels/aarch64.sh tests [PACKAGE...]   Go tests, by default of all packages
#   wheels/aarch64.sh wheel                builds and audits the wheel, and imports it in CPythons
#                                          for aarch64 (wheels/pythons.sh)
#   wheels/aarch64.sh python [FILE...]     Python tests of that wheel, with numpy and torch; by
#                                          default all tests except slow tests
#   wheels/aarch64.sh all                  the three steps above, and a summary
#   wheels/aarch64.sh count                counts instructions of decoders and CRC-32C, for
#                                          docs/benchmarks/host.md
#
# The script needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user. It installs these
# packages if it runs as root. Otherwise it prints which of them are missing, and skips the step.
# wheels/aarch64-left-out.txt lists the tests that qemu cannot run, with reasons. `all` takes hours:
# 330 Python tests in 15 files took 18 minutes (6.5 minutes of CPU time) on two busy cores.
# JOBS sets the number of processes for Python tests.
set -eu
cd "$(dirname "$0")/.."
work=$PWD/build/aarch64
cross=/usr/aarch64-linux-gnu
python=${PYTHON:-.venv/bin/python}
mkdir -p "$work"

# say WORDS: prints a line, and repeats it in the final summary.
say() { echo "aarch64: $*" | tee -a "$work/said.txt"; }

skip() {
	say "$verb: skipped, $1"
	exit 0
}

# logged COMMAND...: runs a command, also writes its output to $work/$verb.log, and returns its status.
logged() {
	rm -f "$work/failed"
	{ "$@" || echo $? >"$work/failed"; } 2>&1 | tee "$work/$verb.log"
	[ ! -e "$work/failed" ]
}

tools() {
	command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null && [ -e $cross/include/stdlib.h ] && return
	[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && {
		apt-get update -qq
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
	} >"$work/apt.log" 2>&1 || skip "gcc-aarch64-linux-gnu, libc6-dev-arm64-cross or qemu-user is missing and cannot be installed"
}

# left_out go|py: prints the Go or Python tests that are left out.
left_out() { sed -n "s/^$1 \([^ ]*\): .*/\1/p" wheels/aarch64-left-out.txt; }

# Test programs start themselves again, and Go test programs also start a C compiler. So each
# program is renamed, and a script with its name starts it under qemu.
runner() {
	mkdir -p "$work/bin"
	ln -sf "$(command -v aarch64-linux-gnu-gcc)" "$work/bin/cc"
	cat >"$work/exec" <<-END
		#!/bin/sh
		mv "\$1" "\$1.aarch64"
		printf '#!/bin/sh\nexec qemu-aarch64 -L $cross -0 "\$0" "\$0.aarch64" "\$@"\n' >"\$1"
		chmod +x "\$1"
		PATH="$work/bin:\$PATH" exec "\$@"
	END
	chmod +x "$work/exec"
}

# packages: installs the packages of .venv and of .venv/transformers5 for aarch64. torch 2.10
# is the last version with an aarch64 wheel that does not need CUDA libraries.
packages() {
	"$python" -m pip list --format=freeze --disable-pip-version-check |
		grep -viE '^(nvidia|cuda|triton|overwire|pip|setuptools|ruff|mypy|torch)[-_=]' >"$work/wanted.txt"
	cat "$work/wanted.txt" requirements/transformers5.txt | cmp -s - "$work/packages/.ready" && return
	rm -rf "$work/packages" "$work/transformers5"
	installed "$work/transformers5" -r requirements/transformers5.txt
	installed "$work/packages" -r "$work/wanted.txt" torch==2.10.0 async_timeout==5.0.1
	cat "$work/wanted.txt" requirements/transformers5.txt >"$work/packages/.ready"
}

# installed FOLDER WHAT...: installs packages for aarch64 to a folder.
installed() {
	into=$1
	shift
	# shellcheck disable=SC2046
	"$python" -m pip install -q --no-compile --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.11 \
		$(printf -- '--platform manylinux_2_%s_aarch64 ' 36 34 31 28 27 26 17) --platform manylinux2014_aarch64 --target "$into" "$@"
}

export GOARCH=arm64 GOEXPERIMENT=
verb=${1:-}
[ $# = 0 ] || shift
case $verb in
tests)
	tools
	runner
	GOFLAGS=$("$python" setup.py goflags) # tests and the wheel share the build cache
	export GOFLAGS CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc
	[ $# != 0 ] || set -- $(go list ./gosrc/... | grep -v '/internal/house$') # house only reads the sources
	status=0
	logged go test -short -vet=off -timeout 60m -skip "^($(left_out go | paste -sd'|'))\$" -exec "$work/exec" "$@" || status=1
	say "Go tests: $(grep -c '^ok' "$work/tests.log") packages passed, $(grep -c '^FAIL	' "$work/tests.log") failed; left out: $(left_out go | paste -sd' ')"
	exit $status
	;;
wheel)
	tools
	CC=aarch64-linux-gnu-gcc GOFLAGS= "$python" wheels/build.py "$work/dist"
	wheels/pythons.sh aarch64 3.10 3.11 3.12 3.13 3.14 3.15 || true
	status=0
	logged "$python" wheels/check.py "$work"/dist/*.whl || status=1
	say "wheel: $(grep -c '^ok' "$work/wheel.log") CPythons passed, $(grep -c '^FAIL' "$work/wheel.log") failed; left out: $(grep -c '^skip' "$work/wheel.log")"
	exit $status
	;;
python)
	tools
	wheels/pythons.sh aarch64 3.11 || skip "there is no CPython to run tests"
	[ -n "$(ls "$work"/dist/*.whl 2>/dev/null)" ] || "$0" wheel
	packages
	rm -rf "$work/packages/overwire"
	"$python" -m zipfile -e "$work"/dist/*.whl "$work/packages"
	unset PYTHONPATH PYTHONDONTWRITEBYTECODE # otherwise each program would compile the torch modules that it imports
	export OVERWIRE_TEST_SLOW=1 OVERWIRE_TEST_GRACE=300 OVERWIRE_TEST_TRANSFORMERS5="$work/transformers5"
	# A .pth file makes the packages importable, because tests set PYTHONPATH.
	site=build/pythons/aarch64/.bookworm/sys/usr/lib/python3/dist-packages
	mkdir -p $site
	trap 'rm -f $site/packages.pth' EXIT
	echo "$work/packages" >$site/packages.pth
	left=$(left_out py | sed 's,^.*::,--deselect=tests/&,;t;s,^,--ignore=tests/,')
	status=0
	# shellcheck disable=SC2086
	logged build/pythons/aarch64/python3.11 -m pytest -p no:cacheprovider -m "not slow" -o timeout=3000 -rs ${JOBS:+-n $JOBS --dist loadgroup} \
		$left "$@" || status=1
	say "Python tests: $(tail -1 "$work/python.log"); left out: $(left_out py | paste -sd' ')"
	exit $status
	;;
all)
	rm -f "$work/said.txt"
	status=0
	for step in tests wheel python; do "$0" $step || status=1; done
	printf '\nwheels/aarch64-left-out.txt has the reasons for tests that were left out.\n'
	cat "$work/said.txt"
	exit $status
	;;
count)
	tools
	export CGO_ENABLED=0 GOFLAGS=-tags=netgo,osusergo,nostores
	go test -vet=off -c -o "$work/x16" ./gosrc/codec/x16
	# counted PROGRAM SYMBOLS BENCHMARK UNITS NAME: counts the instructions per unit; the log has a line for each
	counted() {
		ranges=$(go tool nm -size "$1" | awk -v of="$2" '$NF ~ of {printf "%s0x%s+%s", n++ ? "," : "", $1, $2}')
		qemu-aarch64 -singlestep -d nochain,exec -dfilter "$ranges" -D "$work/log" "$1" -test.run - -test.bench "$3" -test.benchtime 1x >/dev/null
		awk -v name="$5" -v units="$4" 'END {printf "%s: %.2f instructions\n", name, NR / units}' "$work/log"
	}
	decoder='x16[.](tileNEON|mergeBF16NEON|mergeFP32NEON|mergeScalar|steps|[(][*]decoder[)][.](scalar|kernel|merge|segments))([.]abi0)?$'
	for transform in bf16 fp32; do
		for level in scalar NEON; do # the benchmark decodes 131,072 elements twice
			counted "$work/x16" "$decoder" "Decode/^$transform\$/^$level\$" 262144 "$transform, $level, an element"
		done
	done
	go test -vet=off -c -o "$work/codec" ./gosrc/codec
	sums='^hash/crc32[.](update|updateCastagnoli|archUpdateCastagnoli|castagnoliUpdate|slicingUpdate)([.]abi0)?$'
	for way in off on; do # with and without the CPU's instruction; the benchmark sums 716,800 bytes once
		GODEBUG=cpu.crc32=$way counted "$work/codec" "$sums" 'BenchmarkSum$' 716800 "CRC-32C, the CPU's instruction $way, a byte"
	done
	rm "$work/log"
	;;
*)
	echo "usage: wheels/aarch64.sh tests | wheel | python | all | count" >&2
	exit 2
	;;
esac
