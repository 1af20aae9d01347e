#!/bin/sh
# Fetches CPythons that this machine lacks, for wheels/check.py: from Debian's packages,
# with their own C library, unpacked below build/pythons. Nothing of the system changes.
#
#   wheels/pythons.sh x86_64|aarch64 SUITE VERSION...
#
# Each becomes a program build/pythons/MACHINE/pythonVERSION; those of another machine
# run under qemu-user. It says what cannot be had, and ends with 1.
set -eu
cd "$(dirname "$0")/.."
machine=$1 suite=$2
shift 2
case $machine in x86_64) debian=amd64 ;; aarch64) debian=arm64 ;; esac
out=$PWD/build/pythons/$machine
work=$out/.$suite
sys=$work/sys

missing=
for version in "$@"; do [ -x "$out/python$version" ] || missing="$missing $version"; done
[ -n "$missing" ] || exit 0
sorry() { echo "CPython$missing for $machine: $1" >&2; exit 1; }
mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m1 '/debian/\?$') || sorry "apt knows no mirror of Debian"

mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/debs" "$sys"
echo "deb $mirror $suite main" >"$work/sources.list"
apt() {
	apt-get -o "Dir::State=$work/state" -o "Dir::Cache=$work/cache" -o Dir::State::status=/dev/null \
		-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
		-o APT::Architecture=$debian -o APT::Architectures=$debian -o APT::Sandbox::User=root "$@"
}
[ "$suite" = bookworm ] && ssl=libssl3 || ssl=libssl3t64
packages="libc6 libexpat1 zlib1g libffi8 $ssl libuuid1 libbz2-1.0 liblzma5 libgcc-s1 libstdc++6 libzstd1 libsqlite3-0 libcrypt1"
for version in $missing; do packages="$packages python$version-minimal libpython$version-minimal libpython$version-stdlib"; done
(
	apt update -qq
	cd "$work/debs"
	# shellcheck disable=SC2086
	apt download -qq $packages
	for deb in *.deb; do dpkg -x "$deb" "$sys"; done
	for folder in lib lib64; do [ -e "$sys/$folder" ] || ln -s "usr/$folder" "$sys/$folder"; done # as base-files has them
) >"$work/log" 2>&1 || sorry "not to be had: $(tail -1 "$work/log")"

for version in $missing; do
	real=$sys/usr/bin/python$version
	if [ "$machine" = "$(uname -m)" ]; then
		run="$(find "$sys" -name 'ld-linux*.so.*' | head -1) --library-path $sys/lib/$machine-linux-gnu:$sys/usr/lib/$machine-linux-gnu --argv0 $real"
	else
		run="qemu-$machine -L $sys"
	fi
	printf '#!/bin/sh\nexec %s %s "$@"\n' "$run" "$real" >"$out/python$version"
	chmod +x "$out/python$version"
	"$out/python$version" -c 'import sys' || { rm "$out/python$version"; sorry "does not run"; }
done
