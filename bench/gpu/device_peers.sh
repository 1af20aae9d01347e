#!/bin/bash
# Compares loads to one GPU or several with the limit and with other loaders, on a machine with NVIDIA GPUs. Needs
# overwire and torch in PYTHON, nvcc, and the loaders that are compared; a loader that is missing gets a row that says
# so. Prints all rows again at the end.
#
#   bench/gpu/device_peers.sh                    one GPU: first cores net, 9 minutes at most
#   bench/gpu/device_peers.sh pair ranks         two GPUs, 4 minutes at most
#   OUT=folder DIR=/dev/shm BUILDS="--build old=/tmp/old --build new=python" bench/gpu/device_peers.sh first
#
# first: first and later loads on all cores. cores: the same on 8 and 4 cores. net: from HTTP and S3 servers on this
# machine. pair: two processes, each with its own model and GPU. ranks: one model in a group of two.
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/overwire-peers}
BUILDS=${BUILDS:---build new=python}
# NVLink multicast stays off: on a shared host it can disable other users' GPUs.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
. bench/gpu/steps.sh
work=$(mktemp -d "$DIR/overwire-peers-XXXXXX")
trap 'rm -rf "$work"' EXIT
step nvcc 60 nvcc -O3 -std=c++17 -o "$work/copyways" bench/gpu/copyways.cu
steps=${*:-first cores net}

loads() {  # name, limit, arguments
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2086 # BUILDS has several words
    step "$name" "$limit" "$PYTHON" bench/gpu/device_first.py $BUILDS --baseline "$work/copyways" \
        --out "$OUT/$name.json" "$@"
}

for name in $steps; do
    case $name in
    first) loads first 220 --keep "$work/one" --peer-rounds 7 --seconds 165 ;;
    cores) loads cores 220 --size 4GB --keep "$work/small" --peer-rounds 7 --compares 0 --cores 8,4 --seconds 85,115 ;;
    net)
        rm -rf "$work/one" "$work/small"
        step net 90 "$PYTHON" bench/bench_net.py --device cuda --size 4GB --repeat 3 --dir "$work"
        ;;
    pair) loads pair 115 --gpus 2 --size 8GB --keep "$work/pair" --peer-rounds 2 --rounds 5 --seconds 80 ;;
    ranks)
        rm -rf "$work/pair"
        export OVERWIRE_EXCHANGE=${OVERWIRE_EXCHANGE:-mapped}
        step ranks 110 "$PYTHON" -m overwire bench --ranks 2 --size 8GB --dir "$work"
        ;;
    *) echo "unknown step: $name" && failed="$failed $name" ;;
    esac
done
echo "== all rows"
for name in $steps; do
    echo "-- $name"
    grep -E ' cores  |GB/s|in total|raw TCP|left out' "$OUT/$name.txt"
done
end_steps
