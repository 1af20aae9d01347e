#!/bin/bash
# What a machine with two GPUs or more shows of loads by several ranks: that they
# are right over NCCL, then how fast they are. Needs overwire, torch with NCCL and
# pytest in PYTHON.
#
#   tests/gpu/device_ranks.sh                     everything, 4 minutes at most
#   tests/gpu/device_ranks.sh bench               some steps: tests example bench
#   OUT=folder DIR=/dev/shm SIZE=8GB RANKS=2 PYTHON=python3 tests/gpu/device_ranks.sh
#
# Every step has its own time limit, whatever NCCL waits for, and writes to OUT
# as it goes on; one that fails does not stop the next. The status is 0 if all
# passed.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-/tmp/overwire-ranks}
DIR=${DIR:-${TMPDIR:-/tmp}}
SIZE=${SIZE:-8GB}
# NVLink multicast stays off: on a shared host it can disable other users' GPUs.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$OUT"
failed=

step() {  # name, seconds, command...
    local name=$1 limit=$2 t0=$SECONDS rc
    shift 2
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$OUT/$name.txt"
    rc=${PIPESTATUS[0]}
    echo "-- $name: status $rc, $((SECONDS - t0)) s"
    [ "$rc" = 0 ] || failed="$failed $name"
}

RANKS=${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
if [ "$RANKS" -lt 2 ]; then
    echo "needs two GPUs, there are $RANKS"
    exit 1
fi

for name in ${*:-tests example bench}; do
    case $name in
    tests) step tests 75 "$PYTHON" -m pytest -q -x -p no:cacheprovider -o addopts= tests/groups/test_distributed.py -k "gpu or nccl" ;;
    example) step example 45 "$PYTHON" -m pytest -q -p no:cacheprovider -o addopts= tests/peers/test_fastsafetensors.py -k "nccl" ;;
    bench)
        work=$(mktemp -d "$DIR/overwire-ranks-XXXXXX")
        step bench 200 "$PYTHON" -m overwire bench --ranks "$RANKS" --size "$SIZE" --dir "$work"
        rm -r "$work"
        ;;
    *) echo "no step is called $name" && failed="$failed $name" ;;
    esac
done
echo "failed:${failed:- nothing}; everything is in $OUT"
[ -z "$failed" ]
