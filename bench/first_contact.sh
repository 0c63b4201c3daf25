#!/usr/bin/env bash
# The first fifteen minutes of a packed build (bench/pack.sh) on a machine with one GPU, in three blocks. Each is worth its
# time alone and wants nothing of another; each keeps to a time. A block never stops at a failure: it says what failed, tries
# what is simpler, and goes on. What does not fit is NOT RUN.
#
# usage: first_contact.sh A|B|C [OUT [FILE...]]
#   A (240 s)  correctness: versions, libraries; tiny runs that ask for more and more; all GPU tests; losses beside the CPU's;
#              verify of the plainest plans; memcheck and racecheck of attention, norms, cross-entropy
#   B (270 s)  speed: GPT-2 124M beside PyTorch, in turns; a step kernel by kernel, of both; the ops in bf16 beside the card's
#              peak; own attention, no graph, deterministic
#   C (150 s)  strategies: NCCL of one rank; verify of every strategy, ranks sharing the card; the time of some beside one
#              rank's; what was red in A, alone
#   OUT        (default first_contact) gets report_N.md, and first_contact_N.tar.gz with report, logs and caches; one of
#              more than 15 MB in pieces, first_contact_N.tar.gz.aa and so on, for what carries only small files
#   FILE...    that archive of an earlier block, or its pieces, if there is one: its caches save a minute or two
# TESSERA_PYTHON names the interpreter that has torch (default python3), TESSERA_PACKED the build (default ../build),
# FIRST_CONTACT_SECONDS another time for the block. Ends with 1 when something failed, 2 when there is no GPU, 3 when nothing
# could be trained: then no other block is worth its time before that is mended.
set -uo pipefail
die() {
  echo "first_contact.sh: $1" >&2
  exit 2
}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  A) whole=240 title='Correctness' ;;
  B) whole=270 title='Speed' ;;
  C) whole=150 title='Strategies' ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
  *) die "which block? expected A, B or C, found '${1:-}'" ;;
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
    124 | 137) how="HUNG, ended after ${limits[$1]} s" failed=$((failed > 0 ? failed : 1)) ;;
    *) how="FAILED (status $2)" failed=$((failed > 0 ? failed : 1)) ;;
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

# The programs and libraries, side by side.
facts() {
  begin versions 30 bash -c versions
  begin libraries 20 bash -c libraries
  finish
  mend_libraries
}
# Whether a run of the table in a log has a rate.
has_rate() { grep -qsE '^\| [^|]+ \| [0-9][0-9,]+ \|' "$logs/$1.md"; }
part_A() {
  facts
  bench first_runs 90 ladder --models small --limit 40
  finish
  if ! has_rate first_runs; then  # a driver that maps no memory, or loads no code late, would show like this
    TESSERA_GPU_ARENA=plain:16 CUDA_MODULE_LOADING=EAGER bench plainly 60 ladder --models small --limit 30 --attention own
    finish
    : >"$caches/plain_memory"
  elif grep -q 'taken at once' "$logs/first_runs.md"; then
    : >"$caches/plain_memory"
  fi
  plain_memory 2
  export OMP_NUM_THREADS=3  # of all that now runs side by side
  # cuDNN compiles a plan for each shape, 240 in these tests, at a tenth to half of a second each: in a process of their own.
  tests tests 120 tests --limit 100 --fixture-limit 30 --tool-limit 30 --red-out "$caches/red_tests" --filter '*Gpu*-CudnnGpu.*'
  begin cudnn_tests 120 "$build/tests/test_tensor" --gtest_filter='CudnnGpu.*' --gtest_color=no
  if ! has_rate first_runs && ! has_rate plainly; then
    finish
    failed=3
    return
  fi
  bench verify 60 strategies --models small --jobs 2 --limit 40 --only "DDP;ZeRO-3;tensor and sequence;1F1B" --untrained
  TESSERA_GPU_ARENA='' bench losses_small 60 curve --models small --limit 30 --cpu-limit 30
  TESSERA_GPU_ARENA='' bench losses 90 curve --models gpt2 --limit 40 --cpu-limit 80
  finish
  tests sanitizer 100 sanitizer --tools memcheck,racecheck --over attention,norms,cross-entropy --jobs 3 --tool-limit 60 --must
  bench compiled_for_B 150 compile --models gpt2 --batch 32 --settings bf16/default,autocast/default --compile-limit 140
  finish
  sed -n 's/: compiled$//p' "$logs/compiled_for_B.md" >"$caches/compiled"
}
part_B() {
  local settings=bf16/default
  ! grep -qs autocast "$caches/compiled" || settings+=,autocast/default  # compiled already: a start of 20 s, not of 80
  mend_libraries
  bench beside_pytorch 190 pytorch --models gpt2 --batch 32 --rounds 2 --limit 60 --settings "$settings" --compile-limit 110
  finish
  bench kernels 60 kernels --models gpt2 --batch 32 --limit 50
  finish
  bench torch_kernels 45 torch_kernels --models gpt2 --batch 32 --settings bf16/default --compile-limit 40
  finish
  bench ops 45 ops --limit 40
  finish
  bench ways 80 ways --models gpt2 --batch 32 --rounds 1 --limit 30 --steps 15
  finish
}
part_C() {
  mend_libraries
  begin nccl_of_one 40 "$build/tests/test_parallel" --gtest_filter='NcclOneGpu.*' --gtest_color=no
  plain_memory 2
  bench verify 80 strategies --models gpt2 --jobs 6 --limit 30 --untrained
  finish
  plain_memory 30
  bench strategies 90 strategies --models gpt2 --batch 32 --rounds 1 --steps 8 --limit 25 --unverified \
    --only "DDP;ZeRO-3;tensor;1F1B;context, ring;ZeRO-1;tensor and sequence;context, Ulysses;ZB-H1;one of 4 experts"
  finish
  if [[ -s $caches/red_tests ]]; then
    tests red_tests 60 tests --red "$caches/red_tests" --limit 40 --fixture-limit 30 --jobs 4
    finish
  fi
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
say '' "block $part took $SECONDS s of $whole; $( ((failed)) && echo 'something failed' || echo 'nothing failed'); $unrun steps were not run"
exit $failed
