# Sourced by the findings. `need PACKAGE==VERSION ...` installs exactly these packages and their dependencies, and makes
# `python` run with them. FINDINGS_CACHE keeps the packages for later findings. Without it, they are removed at the end.
set -euo pipefail
cache=${FINDINGS_CACHE:-$(mktemp -d)}
work=$(mktemp -d)
trap '[ -n "${FINDINGS_CACHE:-}" ] || rm -rf "$cache"; rm -rf "$work"' EXIT
need() {
	local key
	key="$cache/$(printf '%s\n' "$@" | sort | sha256sum | cut -c1-16)"
	if [ ! -e "$key/whole" ]; then
		rm -rf "$key"
		"${PYTHON:-python3}" -m venv "$key"
		"$key/bin/python" -m pip install -q --disable-pip-version-check --only-binary=:all: "$@"
		touch "$key/whole"
	fi
	PATH="$key/bin:$PATH"
	cd "$work"
	echo "with $*"
}
