#!/usr/bin/env bash
# A run directory on a file system other than ext4: FUSE (bindfs), which does not support rename flags, like NFS and
# Lustre. All commands that write there must succeed and write the same bytes as on a disk.
#   file_systems_test.sh TESSERA
# Exits with 77 (skipped) and the reason if the file system cannot be mounted.
set -euo pipefail
tessera=$(readlink -f "$1")
skip() { echo "skipped: $*"; exit 77; }
[[ -e /dev/fuse ]] || skip "no /dev/fuse"
command -v bindfs >/dev/null || skip "no bindfs"
((EUID == 0)) || skip "mounting needs root"
# A private mount that is removed with this process.
if [[ -z ${TESSERA_OWN_MOUNTS:-} ]]; then
  unshare --mount true 2>/dev/null || skip "mounts of one's own are not allowed here"
  TESSERA_OWN_MOUNTS=1 exec unshare --mount "$0" "$@"
fi
work=$(mktemp -d)
mkdir "$work/disk" "$work/fuse"
bindfs -f "$work/disk" "$work/fuse" 2>"$work/why" &
daemon=$!
cleanup() {
  cd /
  umount -l "$work/fuse" 2>/dev/null || true
  kill "$daemon" 2>/dev/null || true
  rm -rf "$work"
}
trap cleanup EXIT
for _ in {1..100}; do mountpoint -q "$work/fuse" && break; sleep 0.05; done
mountpoint -q "$work/fuse" || skip "a FUSE file system cannot be mounted here: $(head -n 1 "$work/why")"
cd "$work"

fail() { echo "FAILED: $*"; exit 1; }
run() { timeout -k 5 120 "$tessera" "$@" >output 2>&1 || { cat output; fail "$*"; }; }
export TESSERA_CACHE=$work/fuse/cache
seq -f 'Line %g of a text that says little.' 900 >text.txt
train=(train --layers 1 --heads 2 --channels 16 --context 16 --batch 4 --warmup 2 --lr 0.03
  --threads-per-rank 1 --save-every 4 --eval-every 0 --quiet)
same() { for file in model optimizer; do cmp {disk-run,"$1"}"/checkpoints/step-12/$file.safetensors" || fail "$1"; done; }

run "${train[@]}" --data text.txt --steps 12 --out disk-run
run "${train[@]}" --data text.txt --steps 12 --trace --out fuse/run
same fuse/run
echo "checkpoints are bitwise identical to those on a disk"

# Existing checkpoints: the newest is damaged, so the run resumes from the previous one and replaces it.
echo '{}' >fuse/run/checkpoints/step-12/manifest.json
run "${train[@]}" --data text.txt --steps 12 --trace --resume --out fuse/run
same fuse/run
[[ -z $(find fuse -name '*.replaced*' -o -name '*.tmp-*') ]] || fail "$(find fuse -name '*.replaced*' -o -name '*.tmp-*')"
echo "a checkpoint replaces another"

run data text.txt --out fuse/set
run "${train[@]}" --data fuse/set --steps 12 --out fuse/of-set
run checkpoint reshard fuse/run --out fuse/parts --tp 2
run checkpoint export fuse/run --out fuse/folder
run checkpoint import fuse/folder --out fuse/imported
run generate fuse/imported --tokens 5
run report fuse/run
run "${train[@]}" --data text.txt --steps 12 --ranks 2 --zero 3 --out fuse/sharded
echo "datasets, resharded runs, foreign models and reports are written and read"

# A single writer; a killed run leaves a directory that can be resumed.
"$tessera" "${train[@]}" --data text.txt --steps 100000000 --save-every 1 --out fuse/long >long.txt 2>&1 &
long=$!
for _ in {1..400}; do [[ -e fuse/long/checkpoints/latest ]] && break; sleep 0.05; done
if timeout 60 "$tessera" "${train[@]}" --data text.txt --steps 100000000 --resume --out fuse/long >output 2>&1; then fail "two writers"; fi
grep -q 'is being written by another run, process' output || { cat output; fail "the lock is not reported"; }
kill -KILL "$long"
wait "$long" 2>/dev/null || true
read -r name <fuse/long/checkpoints/latest
run "${train[@]}" --data text.txt --steps $((${name#step-} + 3)) --resume --out fuse/long
[[ -z $(find fuse -name '*.replaced*' -o -name '*.tmp-*') ]] || fail "$(find fuse -name '*.replaced*' -o -name '*.tmp-*')"
echo "a directory has one writer, and a killed run resumes"

# A file system may be case-insensitive (SMB, FAT): no two names differ only by case.
[[ -z $(find fuse | tr '[:upper:]' '[:lower:]' | sort | uniq -d) ]] || fail "$(find fuse | tr '[:upper:]' '[:lower:]' | sort | uniq -d)"
echo "no two names differ only by case"
