#!/usr/bin/env bash
# Whether two builds of tessera are the same program: same_bits.sh OLD NEW, each the path of a binary.
#
# Short runs of every strategy, schedule, dtype and optimizer, on threads, under mpirun and, where both binaries can, on
# a GPU (real or emulated): checkpoints must be equal byte for byte, and metrics.jsonl but for times and peaks of memory.
# Then proofs (verify --format json), and command lines that cannot be, whose words and status must be equal. One line
# for each; the status is 1 when any differ.
set -uo pipefail

[ $# -eq 2 ] || { echo "same_bits.sh: expected OLD NEW, found $# words" >&2; exit 2; }
for binary in "$1" "$2"; do
  [ -x "$binary" ] || { echo "same_bits.sh: expected a program, found '$binary'" >&2; exit 2; }
done
declare -A program=([old]=$(realpath "$1") [new]=$(realpath "$2"))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/old" "$work/new"
for ((i = 0; i < 300; ++i)); do echo "Line $i of a text that says little, but $((i % 7)) of it."; done >"$work/text.txt"
export TESSERA_CACHE=$work/cache OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NO_COLOR=1
small="--data ../text.txt --layers 2 --heads 2 --channels 16 --context 16 --batch 8 --threads-per-rank 1 --warmup 2 --lr 0.03"
same=0
differ=0

verdict() { # verdict NAME WORDS DIFFERENCE: a difference that is empty is none
  if [ -z "$3" ]; then
    same=$((same + 1))
    printf 'same     %-10s %s\n' "$1" "$2"
  else
    differ=$((differ + 1))
    printf 'DIFFERS  %-10s %s\n         %s\n' "$1" "$2" "$3"
  fi
}

# in_both BEFORE WORDS: both programs, each in its folder; what they say is kept in out.txt, err.txt and status.txt there.
in_both() {
  local side
  for side in old new; do
    # shellcheck disable=SC2086  # words are meant to be split
    (cd "$work/$side" && $1 "${program[$side]}" $2 >out.txt 2>err.txt; echo $? >status.txt)
  done
}

without_times() { sed -E -e 's/,"gpu":.*/}/' -e 's/"(step_ms|tokens_per_s|mfu|peak_bytes)":(\[[^]]*\]|[^],}]*)//g' "$1"; }

difference() { # difference FOLDER: the first of two runs
  local file name
  [ "$(cat "$work/old/status.txt")" = 0 ] || { echo "the old one fails: $(tail -n 1 "$work/old/err.txt")"; return; }
  [ "$(cat "$work/new/status.txt")" = 0 ] || { echo "the new one fails: $(tail -n 1 "$work/new/err.txt")"; return; }
  for file in "$work/old/$1"/checkpoints/*/config.toml; do  # the newer one may have options besides
    name=${file#"$work/old/"}
    ! diff "$file" "$work/new/$name" | grep -q '^<' || { echo "$name"; return; }
  done
  for file in "$work/old/$1"/checkpoints/*/*.safetensors "$work/old/$1"/checkpoints/*/pushes.txt; do
    [ -e "$file" ] || continue
    name=${file#"$work/old/"}
    cmp -s "$file" "$work/new/$name" || { echo "$name"; return; }
  done
  [ -e "$work/old/$1/checkpoints" ] || echo "no checkpoint"
  cmp <(without_times "$work/old/$1/metrics.jsonl") <(without_times "$work/new/$1/metrics.jsonl") | sed 's|/dev/fd/[0-9]*|metrics.jsonl|g'
}

trains() { # trains NAME WORDS [BEFORE]
  in_both "${3:-}" "train $small --steps 4 --eval-every 2 --save-every 2 --out run $2"
  verdict "$1" "$2" "$(difference run)"
  rm -rf "$work"/{old,new}/run
}

# The old one's run, which both go on with under another layout.
resumes() { # resumes WORDS WORDS
  in_both "" "train $small --steps 2 --out run $1"
  rm -rf "$work/new/run"
  cp -r "$work/old/run" "$work/new/run"
  in_both "" "train --resume --steps 4 --out run $2"
  verdict resume "$1, then $2" "$(difference run)"
  rm -rf "$work"/{old,new}/run
}

proves() {
  in_both "" "verify --format json --layers 2 --heads 2 --channels 16 --context 16 --batch 8 --threads-per-rank 1 --steps 3 $1"
  verdict proof "$1" "$(diff <(sed -E 's/"peak":.*"bubble"/"bubble"/' "$work/old/out.txt") <(sed -E 's/"peak":.*"bubble"/"bubble"/' "$work/new/out.txt") | head -c 300; [ -s "$work/old/out.txt" ] || tail -n 1 "$work/old/err.txt")"
}

says() {
  in_both "" "$1"
  verdict words "$1" "$(cd "$work" && for kept in out.txt err.txt status.txt; do diff "old/$kept" "new/$kept" | head -c 600; done)"
}

trains one "--ranks 1"
trains one "--ranks 1 --microbatches 4 --optimizer sgd"
trains one "--ranks 1 --dtype bf16 --dropout 0.2 --microbatches 2"
trains ddp "--ranks 2 --bucket-mb 0.001 --dropout 0.1"
trains ddp "--ranks 4 --all-reduce ring --optimizer adam"
trains ddp "--ranks 4 --all-reduce tree --microbatches 2"
trains ddp "--ranks 2 --all-reduce root --dtype bf16 --grad-dtype bf16"
trains zero "--ranks 2 --zero 1"
trains zero "--ranks 4 --zero 2 --microbatches 2 --optimizer sgd --momentum 0"
trains zero "--ranks 2 --zero 3 --dtype bf16 --recompute block"
trains dp "--ranks 2 --dp-mode dataparallel --microbatches 2"
trains server "--ranks 4 --dp-mode ps-sync --servers 2"
trains tp "--tp 2"
trains tp "--tp 2 --sp --dtype bf16"
trains cp "--cp 2"
trains cp "--cp 2 --cp-mode ulysses --recompute gelu"
for schedule in naive gpipe 1f1b zb-h1 zb-h2; do trains pp "--pp 2 --microbatches 4 --schedule $schedule"; done
trains pp "--pp 2 --microbatches 4 --schedule interleaved --chunks 2 --layers 4"
trains pp "--pp 2 --microbatches 4 --schedule zb-v --layers 4 --optimizer sgd"
printf '0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1\n' >"$work/both.txt"
trains pp "--pp 1 --ranks 1 --microbatches 2 --schedule ../both.txt"
trains product "--pp 2 --dp 2 --zero 1 --microbatches 2"
trains product "--dp 2 --tp 2 --zero 3"
trains product "--pp 2 --tp 2 --sp --microbatches 2 --schedule zb-h1"
trains product "--cp 2 --tp 2 --dp 2 --zero 2"
trains recompute "--ranks 1 --recompute gelu+norm --dtype bf16"
trains recompute "--tp 2 --recompute block"
trains offload "--ranks 2 --zero 1 --offload optimizer"
trains offload "--ranks 1 --offload optimizer --dtype bf16 --optimizer adam"
trains trace "--pp 2 --microbatches 2 --trace"
(cd "$work/old" && "${program[old]}" train $small --ranks 2 --steps 4 --dp-mode ps-async --record ../order.txt --out recorded >out.txt 2>&1)
trains async "--ranks 2 --dp-mode ps-async --replay ../order.txt"
resumes "--ranks 2" "--dp 1 --tp 2"
resumes "--pp 2 --microbatches 2" "--pp 1 --dp 2 --zero 3"
resumes "--ranks 2 --zero 2 --dtype bf16" "--zero 0 --cp 2 --dp 1"
resumes "--ranks 2 --dp-mode ps-sync --optimizer sgd" "--dp-mode ddp --pp 2 --dp 1"
if command -v mpirun >/dev/null; then
  mpi="mpirun --oversubscribe --bind-to none -n 2"
  trains mpi "--zero 1" "$mpi"
  trains mpi "--pp 2 --microbatches 2 --schedule zb-h1" "$mpi"
  trains mpi "--tp 2" "$mpi"
else
  echo "skipped  mpi: no mpirun here"
fi
in_both "" "train $small --device cuda --ranks 1 --steps 1 --no-save --out run"
rm -rf "$work"/{old,new}/run
if [ "$(cat "$work/old/status.txt" "$work/new/status.txt" | tr -d '\n')" = 00 ]; then
  gpu="--device cuda --deterministic"
  trains gpu "$gpu --ranks 1 --cuda-graph on --dropout 0.1"
  trains gpu "$gpu --ranks 1 --dtype bf16 --cuda-graph off"
  trains gpu "$gpu --ranks 2 --zero 2"
  trains gpu "$gpu --pp 2 --microbatches 2"
else
  echo "skipped  gpu: not both of them find one"
fi

proves "--ranks 2 --bucket-mb 0.001"
proves "--ranks 2 --zero 3 --microbatches 2 --all-reduce ring"
proves "--ranks 4 --dp-mode ps-sync --servers 2"
proves "--pp 2 --microbatches 2 --schedule zb-h1 --zero 1"
proves "--dp 2 --tp 2 --dtype fp64"
proves "--cp 2 --tp 2 --sp --dtype fp64"

for command in "" train verify generate data bench report; do says "$command --help"; done
says "train --heads 3"
says "train --microbatches 5"
says "train --ranks 8 --tp 3"
says "train --tp 3"
says "train --sp --tp 2 --context 7"
says "train --cp 3"
says "train --cp 8 --cp-mode ulysses"
says "train --pp 8"
says "train --pp 2 --schedule foo"
says "train --pp 2 --microbatches 3 --schedule interleaved"
says "train --chunks 3"
says "train --dp 5"
says "train --ranks 4 --dp-mode ps-sync --servers 5"
says "train --zero 2 --dp-mode dataparallel"
says "train --all-reduce native"
says "train --dp-mode ps-sync --all-reduce ring"
says "train --tp 2 --dp-mode ps-sync"
says "train --record x"
says "train --backend nccl"
says "train --backend mpi --ranks 4"
says "train --backend nccl --dp-mode ps-sync"
says "train --cuda-graph on"
says "train --attention cudnn"
says "train --device cuda --offload optimizer --heads 3"
says "train --vocab 3 --data ../text.txt --out none"
says "train --tokenizer none"
says "train --data none"
says "train --resume"
says "train --min-lr 1"
says "train --trace --dp-mode ps-async"
says "verify --dp-mode ps-async --ranks 2"
says "verify --backend nccl --all-reduce native"
says "train $small --lr 1e30 --min-lr 1e30 --warmup 0 --clip 0 --ranks 1 --steps 50 --quiet --out nan"
says "data ../text.txt --tokenizer bpe --vocab 300 --out ../text.txt"

printf '%d the same, %d different\n' "$same" "$differ"
[ "$differ" -eq 0 ]
