# Runs steps for the scripts of this folder on a machine with GPUs. Each step has its own time
# limit and writes to OUT while it runs; one that fails does not stop the next.
PYTHON=${PYTHON:-python3}
DIR=${DIR:-${TMPDIR:-/tmp}}
mkdir -p "$OUT"
failed=

step() {  # name, seconds, command...
    local name=$1 limit=$2 t0=$SECONDS rc
    shift 2
    timeout -k 10 "$limit" "$@" 2>&1 | tee "$OUT/$name.txt"
    rc=${PIPESTATUS[0]}
    echo "-- $name: status $rc, $((SECONDS - t0)) s"
    [ "$rc" = 0 ] || failed="$failed $name"
}

end_steps() {  # the status is 0 if all passed
    echo "failed:${failed:- nothing}; everything is in $OUT"
    [ -z "$failed" ]
}
