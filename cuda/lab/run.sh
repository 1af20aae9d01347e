#!/bin/bash
# Builds and runs the X16 lab on a machine with a GPU: correctness, memory checkers,
# times; a short table last. Six minutes at most.
#
#   cuda/lab/run.sh            everything
#   ARCH=90 OUT=folder         other architecture; where logs go
set -u
cd "$(dirname "$0")"
ARCH=${ARCH:-90}
OUT=${OUT:-/tmp/x16_lab}
mkdir -p "$OUT"
LAB=$OUT/x16_lab
failed=

step() {  # name, seconds, command...
    local name=$1 limit=$2 t0=$SECONDS rc
    shift 2
    timeout -k 5 "$limit" "$@" >"$OUT/$name.txt" 2>&1
    rc=$?
    echo "-- $name: rc $rc, $((SECONDS - t0)) s"
    [ $rc = 0 ] || { failed="$failed $name"; tail -25 "$OUT/$name.txt"; }
    return $rc
}

step build 150 nvcc -std=c++17 -O3 -lineinfo -Xptxas -v -gencode "arch=compute_$ARCH,code=sm_$ARCH" -o "$LAB" x16_lab.cu || exit 1
step check 60 "$LAB" --check
step memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$LAB" --check --only 1 --fuzz 200
step racecheck 45 compute-sanitizer --tool racecheck --error-exitcode 9 "$LAB" --check --only 1 --fuzz 20
step times 120 "$LAB" --fuzz 200
rm -f "$LAB"

echo "== times"
cat "$OUT/times.txt"
grep -hE "FAIL|^all exact" "$OUT/check.txt" | head -20
grep -hE "ERROR SUMMARY|RACECHECK SUMMARY" "$OUT/memcheck.txt" "$OUT/racecheck.txt"
echo "failed steps:${failed:- none}"
[ -z "$failed" ]
