#!/bin/bash
# Tests loads by several ranks on a machine with two or more GPUs: first that they
# are right over NCCL, then how fast they are. Needs overwire, torch with NCCL and
# pytest in PYTHON.
#
#   bench/gpu/device_ranks.sh                     everything, 6 minutes at most
#   bench/gpu/device_ranks.sh bench               some steps: tests example bench offload
#   OUT=folder DIR=/dev/shm SIZE=8GB RANKS=2 PYTHON=python3 bench/gpu/device_ranks.sh
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/overwire-ranks}
SIZE=${SIZE:-8GB}
# NVLink multicast stays off: on a shared host it can disable other users' GPUs.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
. bench/gpu/steps.sh

RANKS=${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
if [ "$RANKS" -lt 2 ]; then
    echo "needs two GPUs, there are $RANKS"
    exit 1
fi

for name in ${*:-tests example bench offload}; do
    case $name in
    tests) step tests 75 "$PYTHON" -m pytest -q -x -p no:cacheprovider -o addopts= tests/groups/test_distributed.py -k "gpu or nccl" ;;
    example) step example 45 "$PYTHON" -m pytest -q -p no:cacheprovider -o addopts= tests/peers/test_fastsafetensors.py -k "nccl" ;;
    bench)
        work=$(mktemp -d "$DIR/overwire-ranks-XXXXXX")
        step bench 200 "$PYTHON" -m overwire bench --ranks "$RANKS" --size "$SIZE" --dir "$work"
        rm -r "$work"
        ;;
    offload) step offload 110 "$PYTHON" bench/gpu/device_offload_group.py --ranks "$RANKS" ;;
    *) echo "unknown step: $name" && failed="$failed $name" ;;
    esac
done
end_steps
