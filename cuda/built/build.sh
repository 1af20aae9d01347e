#!/bin/sh
# Compiles kernels.cu into x16.fatbin and resident.cu into resident.fatbin, next to this
# script, and both again for the GPUs of aarch64 machines (NAME_aarch64.fatbin). Then it
# writes the hashes of the sources. The same sources and compiler give the same bytes in
# any folder: nvcc puts a hash of the sources' folder into names, so the sources are copied
# to a folder that is always the same.
#
#   cuda/built/build.sh NVCC [OUT]
#
# NVCC must come from the wheels cuda-toolkit[nvcc,cudart]==13.0.*: another version writes
# other code, or PTX that a driver 13.0 refuses.
set -eu
cd "$(dirname "$0")/.."
nvcc=$1
out=$(cd "${2:-built}" && pwd)
copy=/tmp/overwire-kernels
mkdir -m 700 "$copy" || { echo "$copy: another build runs, or one was killed: remove it" >&2; exit 1; }
trap 'rm -rf "$copy"' EXIT
trap 'exit 1' HUP INT TERM
cp *.h *.cu *.cuh "$copy"
cd "$copy"
# No -lineinfo: it writes paths.
fatbin() { # NAME SOURCE ARCH...
	name=$1 source=$2
	shift 2
	for arch in "$@"; do
		set -- "$@" -gencode "arch=compute_$arch,code=sm_$arch"
		shift
	done
	"$nvcc" -fatbin -std=c++17 -O3 --compress-mode=size "$@" -gencode arch=compute_80,code=compute_80 -o "$out/$name" "$source"
}
# Code for sm_80 also runs on sm_86 and 89, and code for sm_100 on 103.
for module in x16:kernels.cu resident:resident.cu; do
	fatbin "${module%%:*}.fatbin" "${module##*:}" 80 90 100 120
	fatbin "${module%%:*}_aarch64.fatbin" "${module##*:}" 90 100 121
done
"$nvcc" -ptx -std=c++17 -O3 -arch=compute_80 -o "$out/x16.ptx.tmp" kernels.cu
version=$(grep -m1 '^\.version' "$out/x16.ptx.tmp")
rm "$out/x16.ptx.tmp"
[ "$version" = ".version 9.0" ] || { echo "PTX $version, not 9.0: use the pinned compiler" >&2; exit 1; }
# tests/test_kernels.py compares these hashes with the sources.
sha256sum *.h *.cu *.cuh | grep -v warp_host.h >"$out/sources.sha256"
(cd "$out" && sha256sum x16.fatbin x16_aarch64.fatbin resident.fatbin resident_aarch64.fatbin >>sources.sha256)
