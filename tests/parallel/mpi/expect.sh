# Helpers for the scripts in this directory: mpirun's command line, and checks of a run's result.
# shellcheck shell=bash disable=SC2034  # the sourcing script reads `failed`
export OMP_NUM_THREADS=1
mpirun=(mpirun)
if mpirun --version 2>&1 | grep -qiE 'open(rte| mpi)'; then
  mpirun+=(--allow-run-as-root --oversubscribe --bind-to none)
fi
failed=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# expect NAME SECONDS STATUS LINE COMMAND...: maximum run time, exit status, and a printed line, both as regular
# expressions
expect() {
  local name=$1 limit=$2 wanted=$3 line=$4 status=0 start=$EPOCHREALTIME took
  shift 4
  timeout -k 5 "$((limit + 20))" "$@" >"$output" 2>&1 || status=$?
  took=$(((${EPOCHREALTIME/./} - ${start/./}) / 1000))
  # Open MPI 5 terminates its messages with a 0 byte.
  if [[ ! $status =~ ^($wanted)$ ]] || ((took > limit * 1000)) ||
    ! { echo; tr -d '\0' <"$output"; } | grep -aE "$line" >/dev/null; then
    printf 'FAILED: %s: status %s (expected %s) after %d ms, expected: %s\n' "$name" "$status" "$wanted" "$took" "$line"
    cat "$output"
    failed=1
  else
    printf 'ok: %s: status %s after %d ms\n' "$name" "$status" "$took"
  fi
}
