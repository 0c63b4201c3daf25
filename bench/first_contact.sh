#!/usr/bin/env bash
# The first thirty minutes of a packed build (bench/pack.sh) on a machine with one GPU, in four parts that each keep to a time.
# A part never stops at a failure: it says what failed, tries what is simpler, and goes on. What does not fit is NOT RUN.
#
# usage: first_contact.sh 1|2|3|4 [OUT [FILE...]]
#   1 (270 s)  versions, libraries; tiny runs that ask for more and more; the first number of GPT-2 124M; all GPU tests
#   2 (300 s)  the tests that were red, alone; memcheck and racecheck; the loss beside the CPU's; a step kernel by kernel
#   3 (540 s)  GPT-2 124M beside PyTorch, three rounds; every way of one rank; 350M, one round; max-autotune in spare time
#   4 (300 s)  every strategy, one round; the ops in bf16
#   OUT        (default first_contact) gets report_N.md, and first_contact_N.tar.gz with report, logs and caches; one of
#              more than 15 MB in pieces, first_contact_N.tar.gz.aa and so on, for what carries only small files
#   FILE...    that archive of an earlier part, or its pieces: its caches save minutes, and part 2 reads there what was red
# TESSERA_PYTHON names the interpreter that has torch (default python3), TESSERA_PACKED the build (default ../build),
# FIRST_CONTACT_SECONDS another time for the part. Ends with 1 when something failed, 2 when there is no GPU.
set -uo pipefail
die() {
  echo "first_contact.sh: $1" >&2
  exit 2
}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  1) whole=270 title='First contact' ;;
  2) whole=300 title='Red tests, checkers, curve, kernels' ;;
  3) whole=540 title='Beside PyTorch' ;;
  4) whole=300 title='Strategies and ops' ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
  *) die "which part? expected 1, 2, 3 or 4, found '${1:-}'" ;;
esac
part=$1 whole=${FIRST_CONTACT_SECONDS:-$whole}
deadline=$((SECONDS + whole - 15)) # the rest is for the archive
out=$(realpath -m "${2:-first_contact}") build=$(realpath -m "${TESSERA_PACKED:-$root/build}") python=${TESSERA_PYTHON:-python3}
report=$out/report_$part.md logs=$out/logs_$part caches=$out/caches work=$(mktemp -d) failed=0 unrun=0
mkdir -p "$logs" "$caches" || die "cannot write $out"
if (($# > 2)); then
  cat "${@:3}" | tar -xzf - -C "$out" caches || echo "first_contact.sh: no caches could be read from ${*:3}" >&2
fi
mkdir -p "$caches"/{tessera,inductor,triton}
export TESSERA_CACHE=$caches/tessera TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton
export TORCHINDUCTOR_FX_GRAPH_CACHE=1 build python PATH=$PATH:/usr/local/cuda/bin

say() { printf '%s\n' "$@" | tee -a "$report"; }
not_run() { say '' "## $1" '' "NOT RUN: $2" && unrun=$((unrun + 1)); }
left() { echo $((deadline - SECONDS)); }

names=() pids=() starts=() limits=()
# begin NAME LIMIT COMMAND...: starts it, with no more time than is left; @LEFT in it becomes the seconds that it has to end
# its tables in. Functions are exported and run by bash -c.
begin() {
  local name=$1 limit=$2 words
  (($(left) > limit)) || limit=$(left)
  if ((limit < 8)); then
    not_run "$name" 'no time was left'
    return
  fi
  words=("${@:3}")
  words=("${words[@]//@LEFT/$((limit - 4))}")
  printf '=== %s (at most %s s)\n' "$name" "$limit"
  timeout -k 5 "$limit" "${words[@]}" >"$logs/$name.md" 2>"$logs/$name.err" </dev/null &
  pids+=($!) names+=("$name") starts+=($SECONDS) limits+=("$limit")
}
# Waits for all that has begun, and puts it into the report in that order.
finish() {
  local i status
  for i in "${!pids[@]}"; do
    status=0
    wait "${pids[i]}" || status=$?
    tell "$i" "$status" $((SECONDS - starts[i]))
  done
  names=() pids=() starts=() limits=()
}
tell() {  # tell INDEX STATUS SECONDS
  local name=${names[$1]} how=ok
  case $2 in
    0) ;;
    124 | 137) how="HUNG, ended after ${limits[$1]} s" failed=1 ;;
    *) how="FAILED (status $2)" failed=1 ;;
  esac
  say '' "## $name: $how, $3 s" ''
  head -c 60000 "$logs/$name.md" | tee -a "$report"
  [[ $2 == 0 ]] || { printf '```\n' && tail -n 15 "$logs/$name.err" | cut -c 1-400 && printf '```\n'; } | tee -a "$report"
}
step() { begin "$@" && finish; }
bench() {  # bench NAME LIMIT PART OPTIONS...: of gpu.py
  begin "$1" "$2" "$python" "$root/bench/gpu.py" "$3" --binary "$build/bin/tessera" --python "$python" --logs "$logs/$1" \
    --work "$work" --seconds @LEFT "${@:4}"
}
tests() {  # tests NAME LIMIT PART OPTIONS...: of gpu_tests.py
  begin "$1" "$2" "$python" "$root/bench/gpu_tests.py" "$3" --build "$build" --logs "$logs/$1" --filter '*Gpu*' --seconds @LEFT "${@:4}"
}

versions() {
  nvidia-smi && nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv || true
  nvcc --version | tail -n 2
  uname -srm && ldd --version | head -n 1 && nproc && grep -m 1 'model name' /proc/cpuinfo && free -g | head -n 2
  "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version(),
    "NCCL", torch.cuda.nccl.version(), torch.cuda.get_device_properties(0))' 2>&1
  command -v ncu compute-sanitizer || true
}
libraries() {  # where the program's libraries are; the status is 1 where one is missing
  local found
  found=$(ldd "$build/bin/tessera" "$build"/tests/test_*) || true
  printf '%s\n' "$found" | grep -E 'libcu|libnccl|libnv|not found' | sed 's/ (0x.*//' | sort -u
  ! grep -q 'not found' <<<"$found" && "$build/bin/tessera" --help >/dev/null
}
export -f versions libraries
# A library that the loader has not found, from wherever it lies on this machine.
mend_libraries() {
  local name folder
  for name in $(ldd "$build/bin/tessera" "$build"/tests/test_* 2>/dev/null | awk '/not found/ { print $1 }' | sort -u); do
    folder=$(timeout -k 5 20 find / \( -path /proc -o -path /sys \) -prune -o -name "$name" -not -path '*/stubs/*' -printf '%h\n' -quit 2>/dev/null)
    say "mended: $name is in ${folder:-no folder of this machine}"
    export LD_LIBRARY_PATH=$LD_LIBRARY_PATH${folder:+:$folder}
  done
}

# A driver without virtual memory management: an arena takes its memory at once, so what runs side by side has to share.
plain_memory() {  # plain_memory GIB: of each arena
  [[ ! -e $caches/plain_memory ]] || export TESSERA_GPU_ARENA=plain:$1
}

part_1() {
  begin versions 40 bash -c versions
  begin libraries 20 bash -c libraries
  finish
  mend_libraries
  bench first_runs 120 ladder --models gpt2 --batch 32 --limit 60
  finish
  if grep -q 'taken at once' "$logs/first_runs.md"; then : >"$caches/plain_memory"; fi
  plain_memory 2
  tests tests 160 tests --limit 120 --fixture-limit 40 --tool-limit 40 --red-out "$caches/red_tests"
  finish
}
part_2() {
  mend_libraries
  plain_memory 2
  if [[ -s $caches/red_tests ]]; then
    tests red_tests 110 tests --red "$caches/red_tests" --limit 100 --fixture-limit 40 --jobs 4
  else
    say '' '## red_tests' '' "none: $([[ -e $caches/red_tests ]] && echo 'part 1 has left none' || echo 'no archive of part 1 was given')"
  fi
  tests sanitizer 110 sanitizer --tools memcheck,racecheck --over attention,norms,cross-entropy --jobs 3 --tool-limit 40 --must
  TESSERA_GPU_ARENA='' bench curve 110 curve --models gpt2 --limit 40 --cpu-limit 90
  finish
  TESSERA_GPU_ARENA='' bench kernels 110 kernels --models gpt2 --batch 32 --limit 80
  finish
  tests memcheck_of_all 100 sanitizer --tools memcheck --over tensor,autograd,nn --jobs 3 --tool-limit 90
  finish
}
part_3() {
  local torch=(--settings bf16/default,autocast/default --compile-limit 110)
  mend_libraries
  bench beside_pytorch 280 pytorch --models gpt2 --batch 32 --rounds 3 --limit 60 "${torch[@]}"
  finish
  bench ways 110 ways --models gpt2 --batch 32 --rounds 1 --limit 40
  finish
  bench beside_pytorch_350M 160 pytorch --models gpt2-medium --batch 32 --rounds 1 --limit 60 "${torch[@]}"
  finish
  if (($(left) > 75)); then
    bench max_autotune 300 pytorch --models gpt2 --batch 32 --rounds 1 --settings bf16/max-autotune --compile-limit 200 --limit 60
    finish
  else
    not_run max_autotune "$(left) s were left"
  fi
}
part_4() {
  mend_libraries
  plain_memory 30
  bench strategies 200 strategies --models gpt2 --batch 32 --rounds 1 --steps 10 --limit 30
  finish
  step ops 90 "$build/bin/tessera" bench --device cuda "--benchmark_filter=^op/.*bf16" --benchmark_min_time=0.1
}

pack_up() {
  rm -rf "$work" "$out/first_contact_$part.tar.gz"*
  tar -C "$out" -czf "$out/first_contact_$part.tar.gz" "report_$part.md" "logs_$part" caches
  if (($(stat -c %s "$out/first_contact_$part.tar.gz") > 15000000)); then
    split -b 15000000 "$out/first_contact_$part.tar.gz" "$out/first_contact_$part.tar.gz." && rm "$out/first_contact_$part.tar.gz"
  fi
  rm -rf "$caches" "$logs"
  ls -l "$out"
}
ended() {  # from outside: what there is
  say '' 'NOT FINISHED: ended from outside'
  ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null && sleep 1
  for name in "${names[@]}"; do say '' "## $name: not finished" '' "$(head -c 60000 "$logs/$name.md")"; done
  exit 143
}
trap pack_up EXIT
trap ended TERM INT
printf '# %s, %s, commit %s\n' "$title" "$(date -u +%FT%TZ)" "$(cat "$root/COMMIT" 2>/dev/null || echo unknown)" >"$report"
if ! timeout -k 5 30 nvidia-smi -L >"$logs/card.md" 2>&1; then
  say '' "no GPU: $(tail -n 1 "$logs/card.md")"
  exit 2
fi
source "$root/bench/gpu_libraries.sh"
"part_$part"
say '' "part $part took $SECONDS s of $whole; $( ((failed)) && echo 'something failed' || echo 'nothing failed'); $unrun steps were not run"
exit $failed
