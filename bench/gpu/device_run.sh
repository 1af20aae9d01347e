#!/bin/bash
# Tests overwire on a machine with an NVIDIA GPU: first that it is right, then how
# fast it is. Needs overwire and torch in PYTHON, and for some steps pytest,
# compute-sanitizer and nvCOMP's wheels (in WHEELS).
#
#   bench/gpu/device_run.sh                      everything, 20 minutes at most
#   bench/gpu/device_run.sh bench                some steps: doctor tests sanitizer nvcomp bench net python
#   OUT=folder DIR=/dev/shm BENCH="--size 4GB" PYTHON=python3 bench/gpu/device_run.sh
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/overwire-gpu}
. bench/gpu/steps.sh

tests() {
    if "$PYTHON" -c 'import pytest' 2>/dev/null; then
        step tests 300 "$PYTHON" -m pytest -q -p no:cacheprovider -o addopts= tests/gpu/test_gpu.py
    else
        echo "-- tests: no pytest, not run"
    fi
}

# Runs every kernel on real chunks, only through the engine, under each checker.
sanitizer() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "-- sanitizer: no compute-sanitizer on PATH, not run"
        return
    fi
    local dir kind tool
    dir=$(mktemp -d "$DIR/overwire-sanitizer-XXXXXX")
    for kind in llama-bf16 fp16 fp32 fp8-e4m3 fp8-e5m2 int8 int4 hostile; do
        "$PYTHON" -m overwire bench gen $kind --size 6MB "$dir/$kind.safetensors" >/dev/null &&
            "$PYTHON" -m overwire compress "$dir/$kind.safetensors" -o "$dir/packed-$kind.safetensors" >/dev/null ||
            failed="$failed sanitizer-$kind"
    done
    for tool in memcheck racecheck initcheck synccheck; do
        step $tool 90 compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 "$PYTHON" -c \
            'import sys, overwire; print([overwire.preload(f, device="cuda").wait(80) for f in sys.argv[1:]])' "$dir"/packed-*.safetensors
    done
    rm -r "$dir"
}

# Loads whole files of other kinds of weights, the last with a trace.
each_kind() {
    local dir kind
    dir=$(mktemp -d "$DIR/overwire-kinds-XXXXXX")
    for kind in fp16 fp32 fp8-e4m3 moe-bf16; do
        "$PYTHON" -m overwire bench gen $kind --size 4GB "$dir/plain.safetensors" -f &&
            "$PYTHON" -m overwire compress "$dir/plain.safetensors" -o "$dir/packed.safetensors" -f &&
            step $kind 60 "$PYTHON" -m overwire load "$dir/packed.safetensors" --device cuda --repeat 5 --trace "$OUT/trace.json"
    done
    rm -r "$dir"
}

for name in ${*:-doctor tests sanitizer nvcomp bench net python}; do
    case $name in
    doctor) step doctor 60 "$PYTHON" -m overwire doctor --measure ;;
    tests) tests ;;
    sanitizer) sanitizer ;;
    nvcomp) step nvcomp 120 "$PYTHON" bench/bench_codecs.py ${WHEELS:+--wheels "$WHEELS"} ;;
    # shellcheck disable=SC2086 # BENCH has several words
    bench) step bench 300 "$PYTHON" -m overwire bench --device cuda --dir "$DIR" ${BENCH:-} ;;
    net) step net 200 "$PYTHON" bench/bench_net.py --device cuda --size 8GB --repeat 3 --dir "$DIR" ;;
    python)
        each_kind
        step starts 120 "$PYTHON" bench/bench_start.py --device cuda --dir "$DIR"
        ;;
    *) echo "unknown step: $name" && failed="$failed $name" ;;
    esac
done
end_steps
