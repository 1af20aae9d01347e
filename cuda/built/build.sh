#!/bin/sh
# Compiles kernels.cu to x16.fatbin and resident.cu to resident.fatbin, in this folder or
# in OUT, and both again for the GPUs of aarch64 machines (NAME_aarch64.fatbin). Then writes
# the hashes of sources and modules to sources.sha256.
#
# nvcc puts a hash of the source folder's path into symbol names. The script therefore
# compiles copies in a fixed folder, so that the same sources give the same bytes anywhere.
#
#   cuda/built/build.sh NVCC [OUT]
#
# NVCC must come from the wheels cuda-toolkit[nvcc,cudart]==13.0.*. Other versions generate
# different code, or PTX that CUDA 13.0 drivers reject.
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
# No -lineinfo, because it embeds paths.
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
# tests/house/test_kernels.py compares these hashes with the sources and modules.
sha256sum *.h *.cu *.cuh | grep -v warp_host.h >"$out/sources.sha256"
(cd "$out" && sha256sum x16.fatbin x16_aarch64.fatbin resident.fatbin resident_aarch64.fatbin >>sources.sha256)
