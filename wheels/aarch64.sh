#!/bin/sh
# Tests overwire for Linux aarch64 on an x86-64 machine, under qemu-user: `make aarch64`.
#
#   wheels/aarch64.sh tests    Go tests of what decodes, parses, loads and saves
#   wheels/aarch64.sh wheel    the wheel: built, audited, imported by CPythons for aarch64
#                              (wheels/pythons.sh), one of which then runs Python tests
#   wheels/aarch64.sh count    instructions of the decoders, for docs/benchmarks.md
#
# It needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user, and installs them
# if it may. What is missing is named, and the step is skipped.
set -eu
cd "$(dirname "$0")/.."
work=$PWD/build/aarch64
cross=/usr/aarch64-linux-gnu
python=${PYTHON:-.venv/bin/python}
mkdir -p "$work"

# Packages for Go: pure Go, all that makes bytes of bytes.
packages="tensor codec/... format/... plan pipeline device/cpu save load"

# Python tests that need no torch, which is too slow under qemu.
pytests="tests/test_casts.py tests/test_read_ways.py tests/test_storage.py"

skip() {
	echo "aarch64: skipped, $1"
	exit 0
}

tools() {
	command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null && [ -e $cross/include/stdlib.h ] && return
	[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && {
		apt-get update -qq
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
	} >"$work/apt.log" 2>&1 || skip "gcc-aarch64-linux-gnu, libc6-dev-arm64-cross or qemu-user is missing and cannot be installed"
}

export GOARCH=arm64 GOEXPERIMENT=
case ${1:-} in
tests)
	tools
	list=
	for p in $packages; do list="$list ./gosrc/$p"; done
	# Left out: one needs what madvise says, which qemu-user never asks the kernel, and
	# one starts its own program, which the kernel refuses.
	# shellcheck disable=SC2086
	CGO_ENABLED=0 GOFLAGS=-tags=netgo,osusergo,nostores go test -short -vet=off -skip '^(TestPopulateTruncated|TestKill)$' -exec "qemu-aarch64 -L $cross" $list
	;;
wheel)
	tools
	CC=aarch64-linux-gnu-gcc GOFLAGS= "$python" wheels/build.py "$work/dist"
	wheels/pythons.sh aarch64 bookworm 3.11 || skip "the wheel is built, and not imported"
	wheels/pythons.sh aarch64 forky 3.14 3.15 || true
	"$python" wheels/check.py "$work"/dist/*.whl
	rm -rf "$work/packages"
	"$python" -m pip install -q --no-compile --disable-pip-version-check --only-binary :all: --python-version 3.11 \
		--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
		--target "$work/packages" $(grep -E '^(numpy|ml_dtypes|pytest|pytest-timeout)==' requirements-test.txt | grep -v 'version < ' | sed 's/;.*//')
	"$python" -m zipfile -e "$work"/dist/*.whl "$work/packages"
	# Programs that the tests start have to be started by qemu, too.
	# shellcheck disable=SC2086
	PYTHONPATH="$work/packages" build/pythons/aarch64/python3.11 -B -c '
import sys
sys.executable = sys.argv[1]
import pytest
sys.exit(pytest.main(sys.argv[2:]))' "$PWD/build/pythons/aarch64/python3.11" -p no:cacheprovider -m "not slow" $pytests
	;;
count)
	tools
	CGO_ENABLED=0 GOFLAGS=-tags=netgo,osusergo,nostores go test -vet=off -c -o "$work/x16" ./gosrc/codec/x16
	decoder='x16[.](tileNEON|mergeBF16NEON|mergeFP32NEON|mergeScalar|steps|[(][*]decoder[)][.](scalar|kernel|merge|segments))([.]abi0)?$'
	ranges=$(go tool nm -size "$work/x16" | awk -v of="$decoder" '$NF ~ of {printf "%s0x%s+%s", n++ ? "," : "", $1, $2}')
	for transform in bf16 fp32; do
		for level in scalar NEON; do # a line for each instruction; the benchmark decodes 131,072 elements twice
			qemu-aarch64 -singlestep -d nochain,exec -dfilter "$ranges" -D "$work/log" "$work/x16" -test.run - \
				-test.bench "Decode/^$transform\$/^$level\$" -test.benchtime 1x >/dev/null
			awk -v name="$transform, $level" 'END {printf "%s: %.1f instructions an element\n", name, NR / 262144}' "$work/log"
		done
	done
	rm "$work/log"
	;;
*)
	echo "usage: wheels/aarch64.sh tests | wheel | count" >&2
	exit 2
	;;
esac
