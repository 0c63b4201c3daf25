#!/usr/bin/env bash
# The MPI transport under a real mpirun.
#   mpi_test.sh PROGRAM operations RANKS   every operation, summation order, bytes, messages, groups
#   mpi_test.sh PROGRAM nccl RANKS         the same over NCCL, and its faults; emulated GPUs, or real ones if there are enough
#   mpi_test.sh PROGRAM faults             ranks that throw, die, stop, loop, leave, or call a different operation: each ends the
#                                          job within the timeout of 2 s (plus a second or two for the launcher) and prints
#                                          its cause
set -euo pipefail
program=$1 mode=$2
# shellcheck source=tests/parallel/mpi/expect.sh
source "${BASH_SOURCE[0]%/*}/expect.sh"

if [[ $mode == operations ]]; then
  timeout -k 5 170 "${mpirun[@]}" -n "$3" "$program" hosts 1
  echo "$3 ranks: all operations are correct"
  exit
fi

if [[ $mode == nccl ]]; then
  export TESSERA_EMULATED_GPUS=$3
  gpus=$("$program" gpus)
  if ((gpus < $3)); then
    echo "skipped: $3 ranks over NCCL need as many GPUs, found $gpus"
    exit 77
  fi
  timeout -k 5 100 "${mpirun[@]}" -n "$3" "$program" nccl
  echo "$3 ranks over NCCL: all operations are correct"
fi

# fault RANKS SCENARIO ALGORITHM STATUS LINE: the expected line on standard error, as a regular expression
fault() {
  expect "$1 ranks, $2 by $3" 12 "$4" "^tessera: \[rank [0-9]\] $5" "${mpirun[@]}" -n "$1" "$program" "$2" "$3"
}

all='world axis, all_reduce of 400 bytes \(float32(, on a GPU)?\): '
gone='rank 1 has failed: its process [0-9]+ is gone$'
if [[ $mode == nccl ]]; then
  for ranks in $(seq 2 "$3"); do
    fault "$ranks" throw nccl 3 'the cause$'
    fault "$ranks" kill nccl '137|3' "$all$gone"
    fault "$ranks" stop nccl 3 "${all}rank 1 did not arrive within 2 s; its last operation was all_reduce of 40 bytes \(float32, on a GPU\)$"
    fault "$ranks" mismatch nccl 3 '.* calls '
  done
  exit $failed
fi
for ranks in 2 3; do
  fault $ranks throw direct 3 'the cause$'
  fault $ranks kill direct '137|3' "$all$gone"
  fault $ranks stop direct 3 "${all}rank 1 did not arrive within 2 s; its last operation was all_reduce of 40 bytes \(float32\)$"
done
fault 2 throw ring 3 'the cause$'
fault 2 kill ring '137|3' "${all}recv of 200 bytes: $gone"
fault 2 stop ring 3 "${all}recv of 200 bytes: rank 1 sent nothing within 2 s$"
fault 2 kill native '137|3' "$all$gone"
fault 2 kill-computing direct '137|3' "while this rank computed: $gone"
fault 2 exit direct '[0-9]+' "$all$gone"
fault 3 loop direct 3 "${all}rank 1 did not arrive within 2 s"
fault 2 mismatch direct 3 '.*(broadcast of 400 bytes \(float32, root 0\)|all_reduce of 400 bytes \(float32\)): rank [01] calls '
fault 2 mismatch native 3 '.* calls '
fault 2 leave direct 3 'world axis, (barrier: rank 0 calls all_reduce|all_reduce of 400 bytes \(float32\): rank 1 calls barrier)'
fault 2 lost end 3 'MPI_Finalize: the other ranks did not arrive within 3 s; one is stopped or has exited$'
fault 2 message direct 3 'world axis, recv of 32 bytes: rank 1 sent 28$'
exit $failed
