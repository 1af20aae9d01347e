#!/bin/bash
# Builds and runs the X16 ladder on a machine with a GPU: correctness, memory
# checker, times, profile; a short table last. Six minutes at most.
#
#   cuda/lab/run.sh            everything
#   ARCH=90 OUT=folder         other architecture; where logs and reports go
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
step memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$LAB" --check --only 4 --fuzz 200
step racecheck 45 compute-sanitizer --tool racecheck --error-exitcode 9 "$LAB" --check --only 4 --fuzz 20
step times 120 "$LAB" --fuzz 200

# Profile of the two best kernels: the plain and the bulk words.
for k in 4 6; do
    step "ncu$k" 45 ncu --clock-control none -f -o "$OUT/k$k" -k regex:lab_kernel --launch-skip 2 --launch-count 1 \
        --section SpeedOfLight --section SchedulerStats --section WarpStateStats --section ComputeWorkloadAnalysis \
        --section MemoryWorkloadAnalysis --section MemoryWorkloadAnalysis_Tables --section InstructionStats --section Occupancy \
        "$LAB" --one --only $k --mib 512 && ncu --import "$OUT/k$k.ncu-rep" --page raw >"$OUT/k$k.raw.txt" 2>&1
done
rm -f "$LAB"

for k in 4 6; do
    [ -s "$OUT/k$k.raw.txt" ] || continue
    echo "== kernel $k"
    grep -E "gpu__time_duration.sum|smsp__inst_executed.sum |sm__inst_executed_pipe_(alu|fma|fmaheavy|xu|lsu|uniform)[a-z_]*\.avg\.pct|inst_executed_pipe_alu|issue_active.avg.(pct|per)|issues?_active|issue_stalled_[a-z_]*_per_(warp|issue)_active|l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_(ld|st)|data_pipe_lsu_wavefronts(_mem_shared)?(_op_ld)?\.(sum|avg.pct)|shared_ld|dram__bytes_(read|write).sum |dram__throughput.avg.pct|sm__warps_active.avg.pct" \
        "$OUT/k$k.raw.txt" | sed 's/^ *//; s/  */ /g' | awk '{v = $NF; gsub(",", "", v); if (v != "0" && v + 0 > 0.02) print}' | head -45
done
echo "== ladder"
cat "$OUT/times.txt"
grep -hE "^correctness|FAIL" "$OUT/check.txt" | head -20
grep -hE "ERROR SUMMARY|RACECHECK SUMMARY" "$OUT/memcheck.txt" "$OUT/racecheck.txt"
echo "failed steps:${failed:- none}"
[ -z "$failed" ]
