#!/usr/bin/env bash
# Compares two builds of tessera: same_bits.sh [--no-prose] OLD NEW [WORD...], paths of two binaries.
#
# Short runs of every strategy, schedule, dtype, optimizer and family, on threads, with mpirun and, if both binaries support
# it, on a GPU (real or emulated): checkpoints must be bitwise identical, metrics.jsonl equal except times, and memory peaks
# not larger. Then commands on the runs and folders of the old build (resume, tuning, import, export, 4 bits, generate,
# evaluate, report), plans (times within 3%), datasets, verification (verify --format json), and invalid command lines, whose
# output and status must be equal. Prints one line each; exit status 1 if any differ. WORD selects rows by a substring of
# name or options: same_bits.sh OLD NEW experts muon
# With --no-prose, messages and help may be worded differently: only their numbers and option names are compared.
set -uo pipefail

prose=
case "${1:-}" in --no-prose) prose=no-prose; shift ;; esac
[ $# -ge 2 ] || { echo "same_bits.sh: expected OLD NEW [WORD...], got $# arguments" >&2; exit 2; }
for binary in "$1" "$2"; do
  [ -x "$binary" ] || { echo "same_bits.sh: expected a program, got '$binary'" >&2; exit 2; }
done
declare -A folder=() program=([old]=$(realpath "$1") [new]=$(realpath "$2"))
wanted=("${@:3}")
tests=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TESSERA_PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/old" "$work/new"
for ((i = 0; i < 300; ++i)); do echo "Line $i of a text that says little, but $((i % 7)) of it."; done >"$work/text.txt"
for ((i = 0; i < 40; ++i)); do
  echo "{\"prompt\": \"$i and $((i % 7)) is\", \"completion\": \" $((i + i % 7))\"}" >&3
  echo "{\"messages\": [{\"role\": \"user\", \"content\": \"$i?\"}, {\"role\": \"assistant\", \"content\": \"Line $i.\"}]}" >&4
  echo "{\"text\": \"Document $i says ${i}0.\"}" >&5
done 3>"$work/sums.jsonl" 4>"$work/chat.jsonl" 5>"$work/documents.jsonl"
gzip -k "$work/documents.jsonl"
tac "$work/text.txt" >"$work/more.txt"
export TESSERA_CACHE=$work/cache OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 NO_COLOR=1
sizes="--layers 2 --heads 2 --channels 16 --context 16"
short="--batch 8 --threads-per-rank 1 --warmup 2 --lr 0.03"
small="--data ../text.txt $sizes $short"
tuned="$short --data ../sums.jsonl --steps 4 --eval-every 2 --save-every 2"
same=0
differ=0

asked() { # asked NAME ARGS: whether this row is selected
  local word
  for word in ${wanted[@]+"${wanted[@]}"}; do [[ "$1 $2" != *"$word"* ]] || return 0; done
  [ ${#wanted[@]} -eq 0 ]
}

verdict() { # verdict NAME ARGS DIFFERENCE: an empty difference means equal
  if [ -z "$3" ]; then
    same=$((same + 1))
    printf 'same     %-10s %s\n' "$1" "$2"
  else
    differ=$((differ + 1))
    printf 'DIFFERS  %-10s %s\n         %s\n' "$1" "$2" "$3"
  fi
}

given() { folder[$1]=$2; } # given NAME ARGS: a folder created by the old build for rows that use ../NAME

prepare() { # prepare ARGS: creates the folders used in ARGS
  local name
  for name in "${!folder[@]}"; do
    [[ "$1 " == *"../$name "* && ! -e $work/$name ]] || continue
    prepare "${folder[$name]}"
    # shellcheck disable=SC2086
    (cd "$work/old" && "${program[old]}" ${folder[$name]} --out "../$name" >out.txt 2>&1) || echo "no $name: $(tail -n 1 "$work/old/out.txt")"
  done
}

# in_both BEFORE ARGS: runs both programs in separate directories; output is stored in out.txt, err.txt and status.txt.
in_both() {
  local side
  prepare "$2"
  for side in old new; do
    # shellcheck disable=SC2086  # arguments are split
    (cd "$work/$side" && $1 "${program[$side]}" $2 >out.txt 2>err.txt; echo $? >status.txt)
  done
}

compared() { # compared HOW NAME: the first difference between both results
  local side
  for side in old new; do
    [ "$(cat "$work/$side/status.txt")" = 0 ] || { echo "the $side one fails: $(tail -n 1 "$work/$side/err.txt")"; return; }
  done
  "$python" "$tests/compare/same_records.py" "$1" "$work/old/$2" "$work/new/$2" $prose 2>&1 | tail -n 1
}


# makes NAME ARGS [BEFORE [COMMAND]]: a command that writes a folder. Memory of waiting ranks varies between runs, so a
# larger peak is measured again.
makes() {
  local difference turn
  asked "$1" "$2" || return 0
  for ((turn = 0; turn < 3; ++turn)); do
    in_both "${3:-}" "${4:-} $2 --out run"
    difference=$(compared folder run)
    rm -rf "$work"/{old,new}/run
    [[ $difference == *peak_bytes* ]] || break
  done
  verdict "$1" "$2" "$difference"
}

trains() { # trains NAME ARGS [BEFORE]
  makes "$1" "$2" "${3:-}" "train $small --steps 4 --eval-every 2 --save-every 2"
}

tunes() { # tunes NAME ARGS: on examples, from the run in ARGS
  makes "$1" "$2" "" "train $tuned"
}

# Both builds resume a run of the old build with another layout.
resumes() { # resumes ARGS ARGS [COMMAND]
  asked resume "$1, then $2" || return 0
  in_both "" "${3:-train $small} $1 --steps 2 --out run"
  rm -rf "$work/new/run"
  cp -r "$work/old/run" "$work/new/run"
  in_both "" "train --resume --steps 4 --out run $2"
  verdict resume "$1, then $2" "$(compared folder run)"
  rm -rf "$work"/{old,new}/run
}

answers() { # answers NAME HOW ARGS: standard output of a command, compared as json or words
  asked "$1" "$3" || return 0
  local prose=$prose
  [ "$1" != generate ] || prose=  # the output is the model's
  in_both "" "$3"
  verdict "$1" "$3" "$(compared "$2" out.txt)"
}

proves() { answers proof json "verify --format json $sizes --batch 8 --threads-per-rank 1 --steps 3 $1"; }

says() {
  asked words "$1" || return 0
  in_both "" "$1"
  verdict words "$1" "$(for kept in out.txt err.txt status.txt; do
    "$python" "$tests/compare/same_records.py" message "$work/old/$kept" "$work/new/$kept" $prose; done | head -c 600)"
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
trains cp "--cp 2 --cp-mode ulysses --recompute activation"
for schedule in naive gpipe 1f1b zb-h1 zb-h2; do trains pp "--pp 2 --microbatches 4 --schedule $schedule"; done
trains pp "--pp 2 --microbatches 4 --schedule interleaved --chunks 2 --layers 4"
trains pp "--pp 2 --microbatches 4 --schedule zb-v --layers 4 --optimizer sgd"
printf '0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1\n' >"$work/both.txt"
trains pp "--pp 1 --ranks 1 --microbatches 2 --schedule ../both.txt"
trains product "--pp 2 --dp 2 --zero 1 --microbatches 2"
trains product "--dp 2 --tp 2 --zero 3"
trains product "--pp 2 --tp 2 --sp --microbatches 2 --schedule zb-h1"
trains product "--cp 2 --tp 2 --dp 2 --zero 2"
trains recompute "--ranks 1 --recompute activation+norm --dtype bf16"
trains recompute "--tp 2 --recompute block"
trains offload "--ranks 2 --zero 1 --offload optimizer"
trains offload "--ranks 1 --offload optimizer --dtype bf16 --optimizer adam"
trains trace "--pp 2 --microbatches 2 --trace"
given recorded "train $small --ranks 2 --steps 4 --dp-mode ps-async --record ../recorded.txt"
prepare "../recorded"
trains async "--ranks 2 --dp-mode ps-async --replay ../recorded.txt"
resumes "--ranks 2" "--dp 1 --tp 2"
resumes "--pp 2 --microbatches 2" "--pp 1 --dp 2 --zero 3"
resumes "--ranks 2 --zero 2 --dtype bf16" "--zero 0 --cp 2 --dp 1"
resumes "--ranks 2 --dp-mode ps-sync --optimizer sgd" "--dp-mode ddp --pp 2 --dp 1"

llama="--family llama --kv-heads 1"
trains llama "$llama --ranks 1 --ffn 40 --untied"
trains llama "$llama --ranks 2 --qkv-bias --dropout 0.1 --microbatches 2"
trains llama "$llama --ranks 2 --zero 3 --dtype bf16 --qk-norm --norm-eps 1e-6"
trains llama "--family llama --tp 2 --sp --head-dim 4 --rope-theta 500"
trains llama "$llama --pp 2 --microbatches 4 --schedule zb-h1"
trains llama "$llama --pp 2 --microbatches 4 --schedule v-min --layers 4"
trains llama "$llama --cp 2 --rope-scaling llama3 --rope-factor 4 --rope-original-context 8"
trains llama "--family llama --cp 2 --cp-mode ulysses --rope-scaling linear --rope-factor 2"
trains llama "$llama --ranks 1 --tie-copies --recompute activation+norm --shuffle"
trains llama "--model llama-nano --layers 2 --ranks 1 --recompute attention --vocab 64"
experts="--family llama --experts 4 --ffn 16"
trains experts "$experts --ranks 1"
trains experts "$experts --dp 2 --ep 2 --microbatches 2"
trains experts "$experts --dp 2 --ep 2 --zero 2 --dtype bf16 --expert-capacity 1"
trains experts "$experts --dp 4 --ep 2 --zero 3 --shared-experts 1"
trains experts "$experts --tp 2 --sp --router-softmax all --balance-loss 0.1 --z-loss 0"
trains experts "$experts --pp 2 --microbatches 2 --experts-per-token 1 --recompute block"
trains experts "--experts 3 --cp 2"
trains muon "--optimizer muon --ranks 1"
trains muon "--optimizer muon --ranks 2 --zero 1 --momentum 0.9"
trains muon "--optimizer muon --tp 2 --dtype bf16"
trains muon "--optimizer muon --pp 2 --microbatches 2 --zero 2 --dp 2 $llama"
trains muon "--optimizer muon $experts --dp 2 --ep 2"
trains diloco "--ranks 2 --dp-mode diloco --sync-every 2"
trains diloco "--ranks 2 --dp-mode diloco --sync-every 2 --sync-fragments 2 --dtype bf16"
trains diloco "--dp 2 --tp 2 --dp-mode diloco --sync-every 2 --outer-lr 0.5 --outer-momentum 0 --optimizer muon"
trains diloco "--dp 2 --pp 2 --dp-mode diloco --sync-every 4 --microbatches 2 $llama"
trains shards "--ranks 4 --zero 1 --shard-ranks 2"
trains shards "--ranks 4 --zero 2 --shard-ranks 2 --dtype bf16"
trains shards "--ranks 4 --zero 3 --shard-ranks 2 --microbatches 2"
trains shards "--dp 4 --pp 2 --zero 3 --shard-ranks 2 --microbatches 2 $llama"
states="--dtype bf16 --state-dtype bf16"
trains states "$states --ranks 1"
trains states "$states --grad-dtype bf16 --ranks 2"
trains states "$states --ranks 2 --zero 3 --optimizer adam"
trains states "$states --tp 2 --optimizer sgd --family llama"
trains states "$states --ranks 2 --zero 1 --grad-dtype bf16 --offload optimizer"
trains replicas "--dp 2 --tp 2 --check-replicas 1"
given masked "data ../documents.jsonl --tokenizer $tests/data/fixtures/tokenizers/gpt2"
trains documents "--data ../masked --document-mask $llama --ranks 2"
trains mixture "--data ../text.txt=0.7,../more.txt=0.3 --tokenizer bytes --ranks 2"
trains bpe "--tokenizer bpe-300 --ranks 1"
resumes "--family llama --pp 2 --microbatches 2 --schedule zb-h2" "--pp 1 --dp 1 --tp 2"
resumes "$experts --dp 2 --ep 2" "--ep 1 --dp 1 --pp 2"
resumes "$experts --ranks 1" "--ranks 4 --ep 4 --zero 3"
resumes "--optimizer muon --ranks 2 --zero 1" "--dp 1 --tp 2 --zero 0"
resumes "--ranks 2 --dp-mode diloco --sync-every 4" "--sync-every 4"
resumes "--ranks 4 --zero 3 --shard-ranks 2" "--zero 2 --ranks 2 --shard-ranks 1"
resumes "$states --ranks 2" "--zero 3"
resumes "--ranks 1 --offload optimizer" "--offload none --ranks 2"
resumes "--ranks 1 --tokenizer bpe-300 --shuffle" "--ranks 2"

given gpt2 "train $small --steps 3 --ranks 1 --tokenizer bpe-300"
given llama "train $small --steps 3 --ranks 1 --context 64 --family llama --tokenizer bytes"
given wide "train $small --steps 3 --ranks 1 --channels 128 --family llama --tokenizer bytes --untied"
given long "train $small --steps 2 --ranks 1 --context 320 --batch 2 --family llama --tokenizer bytes"
given experts "train $small --steps 3 --ranks 1 $experts --tokenizer bytes"
tunes tuning "--init ../llama --ranks 2"
tunes tuning "--init ../gpt2 --ranks 1 --pack --train-on all --data ../chat.jsonl"
tunes tuning "--init ../llama --tp 2 --template chatml --data ../chat.jsonl"
tunes tuning "--init ../long --ranks 1 --template llama3 --data ../chat.jsonl"
tunes tuning "--init ../long --pp 2 --microbatches 2 --template alpaca"
tunes tuning "--init ../llama --ranks 1 --data ../documents.jsonl --skip-bad"
tunes adapters "--init ../llama --lora-rank 2 --ranks 1"
tunes adapters "--init ../gpt2 --lora-rank 2 --lora-alpha 8 --lora-dropout 0.2 --ranks 2"
tunes adapters "--init ../llama --lora-rank 4 --lora-targets all --lora-rslora --tp 2"
tunes adapters "--init ../llama --lora-rank 2 --lora-targets q_proj,o_proj,down_proj --ranks 2 --zero 3 --dtype bf16"
tunes adapters "--init ../llama --lora-rank 2 --lora-targets all --pp 2 --microbatches 2 --optimizer adam"
tunes adapters "--init ../experts --lora-rank 2 --ranks 2"
given tuned "train $tuned --init ../llama --lora-rank 2 --ranks 1"
given small4 "checkpoint quantize ../wide --calibrate ../text.txt --group 32 --windows 8"
tunes 4-bits "--init ../wide --lora-rank 2 --quantize nf4 --ranks 1"
tunes 4-bits "--init ../wide --lora-rank 2 --lora-targets all --quantize nf4 --ranks 2 --zero 3 --dtype bf16"
tunes 4-bits "--init ../wide --lora-rank 2 --quantize nf4 --tp 2"
tunes 4-bits "--init ../small4 --lora-rank 2 --ranks 1"
tunes 4-bits "--init ../small4 --lora-rank 2 --quantize gptq --pp 2 --microbatches 2"
resumes "--init ../llama --lora-rank 2 --ranks 2" "--dp 1 --tp 2" "train $tuned"
resumes "--init ../wide --lora-rank 2 --quantize nf4 --ranks 1" "--ranks 2 --zero 3" "train $tuned"
resumes "--data ../chat.jsonl --init ../llama --pack --ranks 1" "--ranks 2" "train $tuned"

for words in gpt2 llama experts "wide --dtype bf16" tuned "tuned --merge"; do makes export "checkpoint export ../$words"; done
for from in gpt2 llama experts wide tuned; do given "hub-$from" "checkpoint export ../$from"; done
for words in gpt2 llama experts "wide --dtype bf16 --tokenizer bytes"; do makes import "checkpoint import ../hub-$words"; done
makes quantize "checkpoint quantize ../wide --calibrate ../text.txt --group 32 --windows 8"
makes quantize "checkpoint quantize ../hub-wide --method rtn --group 64"
makes reshard "checkpoint reshard ../llama --dp 2 --tp 2 --zero 3"
makes reshard "checkpoint reshard ../gpt2 --pp 2 --dp 2 --zero 1"
for from in gpt2 hub-llama experts tuned small4; do answers inspect words "checkpoint inspect ../$from"; done
given parts "checkpoint reshard ../llama --dp 2 --tp 2 --zero 3"
makes reshard "checkpoint reshard ../parts"
answers generate words "generate ../llama --tokens 40"
answers generate json "generate ../gpt2 --tokens 20 --format json --prompt Line --prompt text --temperature 1 --top-k 5 --seed 3"
answers generate words "generate ../hub-gpt2 --tokens 20 --prompt Line --top-p 0.8 --min-p 0.1 --repetition-penalty 1.3"
answers generate words "generate ../experts --tokens 20 --prompt Line --temperature 0 --stop says --ignore-end"
answers generate words "generate ../wide --tokens 20 --prompts ../documents.jsonl --quantize nf4"
answers generate words "generate ../small4 --tokens 20 --prompt Line --dtype bf16"
answers generate words "generate ../tuned --tokens 20 --prompt 3 --tp 2"
answers generate words "generate ../hub-llama --tokens 20 --prompt Line --pp 2 --ranks 2 --format json"
answers evaluate json "evaluate ../llama --data ../text.txt --format json"
answers evaluate json "evaluate ../hub-gpt2 --data ../text.txt --format json --dtype bf16 --batch 3"
answers evaluate json "evaluate ../experts --data ../text.txt --format json --ranks 2"
answers evaluate json "evaluate ../wide --data ../text.txt --format json --quantize nf4 --context 8"
answers evaluate json "evaluate ../small4 --data ../text.txt --format json --tp 2"
answers evaluate json "evaluate ../hub-llama --data ../text.txt --format json --cp 2 --cp-mode ring"
answers evaluate json "evaluate ../parts --data ../text.txt --format json --pp 2"
answers evaluate words "evaluate ../tuned --data ../sums.jsonl"
answers evaluate words "evaluate ../hub-llama --data ../chat.jsonl --template chatml --train-on all --context 64"

sources=(Korthikanti MosaicML Narayanan Qi torchtitan BigScience)
for source in "${sources[@]}"; do
  grep "\"source\":\"$source" "$tests/planner/published.jsonl" | sed -E 's/^.*"case"://; s/\}$//' >"$work/$source.jsonl"
  answers cases json "plan --cases ../$source.jsonl --format json"
done
{
  model='{"layers":8,"channels":1024,"heads":16,"kv_heads":4,"ffn":2816,"gated":true,"vocab":32000,"context":4096,"tied":false,"positions":"rope"'
  for words in '"tp":4,"sp":true,"dp":2,"zero":1' '"dp":8,"zero":3' '"cp":4,"dp":2' '"pp":4,"dp":2,"schedule":"zb-v"' '"pp":4,"dp":2,"schedule":"interleaved","chunks":2' \
    '"pp":8,"schedule":"zb-h2","recompute":"activation+norm"' '"dp":8,"zero":2,"recompute":"attention"'; do
    echo "{\"model\":$model},\"plan\":{$words,\"sequences\":1,\"microbatches\":8},\"hardware\":\"h100\"}"
    echo "{\"model\":$model},\"plan\":{$words,\"sequences\":2,\"microbatches\":16},\"hardware\":{\"base\":\"a100-80\",\"ranks_per_node\":4},\"software\":\"fsdp\"}"
  done
  echo "{\"model\":$model,\"experts\":8,\"experts_per_token\":2},\"plan\":{\"dp\":8,\"ep\":4,\"zero\":2,\"sequences\":1,\"microbatches\":2},\"hardware\":\"h100\"}"
} >"$work/own.jsonl"
answers cases json "plan --cases ../own.jsonl --format json"
answers plan json "plan --model llama2-7b --hardware h100 --ranks 8 --batch 64 --format json"
answers plan words "plan --model llama2-7b --hardware h100 --ranks 8 --batch 64 --tp 2 --zero 1"
answers plan json "plan --model llama3-70b --context 8192 --hardware h100 --ranks 64 --batch 512 --pp 4 --tp 8 --format json"
answers plan json "plan --model mixtral-8x7b --hardware a100-80 --ranks 16 --batch 64 --ep 4 --pp 1 --format json"
answers plan words "plan --model gpt2-xl --hardware a100-80 --software megatron --ranks 16 --batch 64 --memory 20 --top 3"
answers plan json "plan --model gpt2-medium --hardware h100 --ranks 4 --batch 32 --cp 2 --recompute block --format json"

given traced "train $small --steps 4 --pp 2 --dp 2 --zero 1 --microbatches 2 --trace"
answers report words "report ../traced --format text"
answers report words "report ../traced ../llama --format text"
for figure in pipeline memory timeline bytes loss; do makes report "report ../traced --figure $figure --svg"; done
makes report "report --figure memory --svg --ranks 4 --zero 0,1,2,3"
makes report "report --figure bytes --svg --ranks 4 --zero 0,3"
makes report "report --figure pipeline --svg --layers 8 --pp 4 --microbatches 8 --schedule 1f1b,zb-h1,zb-v"

for tokenizer in gpt2 llama2 llama3 mistral qwen roberta smollm words; do
  makes data "data ../text.txt --tokenizer $tests/data/fixtures/tokenizers/$tokenizer"
done
for words in "documents.jsonl ../text.txt --tokenizer bpe --vocab 320 --shard-tokens 2000" "text.txt --tokenizer char" \
  "documents.jsonl.gz --tokenizer bytes"; do makes data "data ../$words"; done
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
  trains gpu "$gpu --ranks 1 $llama --dtype bf16"
  trains gpu "$gpu --dp 2 --ep 2 $experts"
  trains gpu "$gpu --ranks 2 --zero 3 --dtype bf16 --optimizer adam"
  trains gpu "$gpu --ranks 2 --zero 1 --offload optimizer --optimizer muon"
  tunes gpu "$gpu --init ../wide --lora-rank 2 --quantize nf4 --ranks 1"
else
  echo "skipped  gpu: not both of them find one"
fi

proves "--ranks 2 --bucket-mb 0.001"
proves "--ranks 2 --zero 3 --microbatches 2 --all-reduce ring"
proves "--ranks 4 --dp-mode ps-sync --servers 2"
proves "--pp 2 --microbatches 2 --schedule zb-h1 --zero 1"
proves "--dp 2 --tp 2 --dtype fp64"
proves "--cp 2 --tp 2 --sp --dtype fp64"
proves "$llama --pp 2 --dp 2 --zero 2 --microbatches 2 --schedule zb-v --layers 4"
proves "$experts --dp 2 --ep 2 --zero 3"
proves "--optimizer muon --ranks 2 --zero 1 --dtype bf16"
proves "--ranks 4 --zero 3 --shard-ranks 2"
proves "--ranks 2 --dp-mode diloco --sync-every 2"
proves "$states --ranks 2 --zero 3"

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
