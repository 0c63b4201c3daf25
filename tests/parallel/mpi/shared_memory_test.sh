#!/usr/bin/env bash
# MPI ranks with little shared memory, and ranks that fail during setup: nothing hangs.
#   shared_memory_test.sh PROGRAM
# Each run has 60 s and needs a few. If mounting is allowed, the test uses a small private /dev/shm.
set -euo pipefail
program=$1
# shellcheck source=tests/parallel/mpi/expect.sh
source "${BASH_SOURCE[0]%/*}/expect.sh"

# Without shared memory ranks use messages; from the start, and in a second world.
alone="^tessera: \[rank 0\] cannot create shared memory: .*ranks on this host exchange messages"
expect "3 ranks without shared memory" 60 0 "$alone" "${mpirun[@]}" -n 3 "$program" messages
expect "a second world without shared memory" 60 0 "$alone" "${mpirun[@]}" -n 2 "$program" messages later

# A rank that fails during setup ends the job.
threads='^tessera: \[rank 1\] system error: Resource temporarily unavailable'
for ranks in 2 3; do
  expect "$ranks ranks, one fails before the world exists" 60 3 '^tessera: the cause$' "${mpirun[@]}" -n $ranks "$program" lost before
  expect "$ranks ranks, one fails while creating the world" 60 3 "$threads" "${mpirun[@]}" -n $ranks "$program" lost first
  expect "$ranks ranks, one fails in a second world" 60 3 "$threads" "${mpirun[@]}" -n $ranks "$program" lost second
done

# SIZE LEFT COMMAND...: runs with a /dev/shm of SIZE bytes, LEFT of them free
# shellcheck disable=SC2016  # the inner shell expands
small=(unshare --mount bash -euc 'mount -t tmpfs -o size=$0 tmpfs /dev/shm
  (($0 == $1)) || fallocate -l $(($0 - $1)) /dev/shm/taken
  shift; exec "$@"')
if ! "${small[@]}" 65536 4096 true 2>/dev/null; then
  echo "skipped: cannot mount a small /dev/shm"
  exit $failed
fi
mib=$((1 << 20))
expect "a /dev/shm of 64 MB" 60 0 '' "${small[@]}" $((64 * mib)) $((64 * mib)) "${mpirun[@]}" -n 2 "$program" hosts 1
short() { echo "^tessera: /dev/shm has $1 bytes left, .*shm-size"; }
for left in $((6 * mib)) 65536; do
  expect "a /dev/shm of 64 MB with $left bytes left" 60 0 "$(short $left)" "${small[@]}" $((64 * mib)) $left "${mpirun[@]}" -n 3 "$program" lost never
done
expect "a /dev/shm of 64 MB with nothing left" 60 0 "$(short 0)" "${small[@]}" $((64 * mib)) 0 "${mpirun[@]}" -n 2 "$program" hosts 1
expect "a full /dev/shm and a killed rank" 60 '137|3' 'rank 1 has failed: its process [0-9]+ is gone$' \
  "${small[@]}" $((64 * mib)) 0 "${mpirun[@]}" -n 2 "$program" kill direct

# The next job removes the files of a job whose processes were all killed, but neither those of a running job nor
# foreign files.
# shellcheck disable=SC2016  # the inner shell expands
left='folders() { find /dev/shm -mindepth 1 -maxdepth 1 -name "tessera-messages.tmp-*" | sort; }
  wait_for() { for ((i = 0; i < 200; ++i)); do (($(folders | wc -l) == $1)) && return; sleep 0.1; done; folders; echo "expected $1"; exit 1; }
  mkdir -p "$TMPDIR" && touch /dev/shm/vader_segment.host.0.1.0
  trap "touch /dev/shm/over; rm -rf $TMPDIR" EXIT
  "$@" stay & running=$!
  wait_for 2; alive=$(folders)
  setsid "$@" stay & killed=$!
  wait_for 4
  [[ -n $(find $alive -type f) ]] || { echo "no file of MPI in $alive"; exit 1; }
  for pid in $killed $(pgrep -s $killed); do kill -9 $pid; done
  sleep 0.2
  wait_for 4
  "$@" hosts 1 || exit 1
  [[ $(folders) == "$alive" && -e /dev/shm/vader_segment.host.0.1.0 ]] || { folders; echo "expected $alive"; exit 1; }
  touch /dev/shm/over; wait $running || exit 1
  wait_for 0'
TMPDIR=$(mktemp -d) expect "a job whose processes were all killed" 60 0 '' \
  "${small[@]}" $((512 * mib)) $((512 * mib)) bash -uc "$left" bash "${mpirun[@]}" -n 2 "$program"
exit $failed
