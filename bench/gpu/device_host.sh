#!/bin/bash
# Measures the host store on a machine with GPUs: loads, sleep, level-2 sleep, the size of ten
# models. Needs overwire and torch in PYTHON. InstantTensor is measured if it is installed.
#
#   bench/gpu/device_host.sh one      on one GPU, 4 minutes at most
#   bench/gpu/device_host.sh two      on two GPUs, 150 seconds at most
#   OUT=folder DIR=/dev/shm DISK=/tmp SIZE=16 PYTHON=python3 bench/gpu/device_host.sh one
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/overwire-host}
DIR=${DIR:-/dev/shm}
SIZE=${SIZE:-16}
DEVICE=${DEVICE:-cuda}
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
. bench/gpu/steps.sh

work=$(mktemp -d "$DIR/overwire-host-XXXXXX")
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m compileall -q python bench/gpu

part() { # name, seconds
    step "$1" "$2" "$PYTHON" bench/gpu/device_host.py "$1" --work "$work" --disk "${DISK:-/tmp}" --size "$SIZE" --device "$DEVICE"
}

case ${1:-one} in
one)
    part files 45
    part packed 65
    step level2 35 "$PYTHON" bench/gpu/device_level2.py --size "$SIZE" --folder "$work/level2"
    part sleep 45
    part plain 40
    part ten 10
    ;;
two)
    part files 70
    part two 75
    ;;
*) echo "unknown: $1" && failed="$failed $1" ;;
esac
end_steps
