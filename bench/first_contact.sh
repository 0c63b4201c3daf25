#!/usr/bin/env bash
# Everything that needs a GPU, in one go of eight minutes: a build for it (bench/pack.sh, or any other), tested and measured on a
# machine with one. Each part ends by itself, and never stops the others: it says what failed, and what it has
# not come to is NOT RUN. What takes no times runs side by side, what is timed runs alone.
#
# usage: first_contact.sh all|A|B|C|PART[,PART...] [OUT [FILE...]]
#   all (480 s)  first runs; then side by side all GPU tests, verify of every strategy, losses beside the CPU's, models to tune,
#                and PyTorch compiles; then alone, one after another: PyTorch in turns, a step kernel by kernel, strategies,
#                long contexts, experts and 1B with their memory, adapters and generation, ways, ops; last compute-sanitizer
#   A B C        its thirds, for machines that are had for minutes: is it right (240 s), PyTorch, kernels, ways and ops
#                (270 s), strategies, shapes and tuning (200 s)
#   PART         first_runs right pytorch kernels strategies strategy_kernels shapes tuning ways ops sanitizer
#   OUT          (default first_contact) gets report_WHAT.md, and first_contact_WHAT.tar.gz with report and logs, and caches
#                where it was not `all`; one of more than 15 MB in pieces, at most 6, for what carries only small files
#   FILE...      that archive of an earlier call, or its pieces, if there is one: its caches save a minute or two
# TESSERA_PYTHON names the interpreter that has torch (default python3), TESSERA_PACKED the build (default ../build),
# FIRST_CONTACT_SECONDS another time for all of it. Ends with 1 when something failed, 2 when there is no GPU, 3 when nothing
# could be trained. Where there is time for more rounds, models and tools: gpu.py and gpu_tests.py by themselves.
set -uo pipefail
die() {
  echo "first_contact.sh: $1" >&2
  exit 2
}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
what=${1:-} known=' first_runs right pytorch kernels strategies strategy_kernels shapes tuning ways ops sanitizer '
case $what in
  all) whole=480 parts='first_runs right pytorch kernels strategies strategy_kernels shapes tuning ways ops sanitizer' ;;
  A) whole=240 parts='first_runs right sanitizer' ;;
  B) whole=270 parts='pytorch kernels ways ops' ;;
  C) whole=200 parts='strategies strategy_kernels shapes tuning' ;;
  -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
  *) whole=480 parts=${what//,/ } ;;
esac
[[ -n $parts ]] || die "what? expected all, A, B, C or some of$known"
for part in $parts; do [[ $known == *" $part "* ]] || die "unknown part '$part'; expected all, A, B, C or some of$known"; done
whole=${FIRST_CONTACT_SECONDS:-$whole}
deadline=$((SECONDS + whole - 15)) # the rest is for the archive
out=$(realpath -m "${2:-first_contact}") build=$(realpath -m "${TESSERA_PACKED:-$root/build}") python=${TESSERA_PYTHON:-python3}
report=$out/report_$what.md logs=$out/logs_$what caches=$out/caches work=$(mktemp -d) failed=0 unrun=0
mkdir -p "$logs" "$caches" || die "cannot write $out"
if (($# > 2)); then
  cat "${@:3}" | tar -xzf - -C "$out" caches || echo "first_contact.sh: no caches could be read from ${*:3}" >&2
fi
mkdir -p "$caches"/{tessera,inductor,triton}
export TESSERA_CACHE=$caches/tessera TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton
export TORCHINDUCTOR_FX_GRAPH_CACHE=1 build python PATH=$PATH:/usr/local/cuda/bin

say() { printf '%s\n' "$@" | tee -a "$report"; }
left() { echo $((deadline - SECONDS)); }

names=()
declare -A pids=() starts=() limits=()
# begin NAME LIMIT COMMAND...: starts it, with no more time than is left; @LEFT in it becomes the seconds that it has to end
# its tables in. Functions are exported and run by bash -c.
begin() {
  local name=$1 limit=$2 words
  (($(left) > limit)) || limit=$(left)
  if ((limit < 8)); then
    say '' "## $name" '' 'NOT RUN: no time was left' && unrun=$((unrun + 1))
    return
  fi
  words=("${@:3}")
  words=("${words[@]//@LEFT/$((limit - 4))}")
  printf '=== %s (at most %s s)\n' "$name" "$limit"
  timeout -k 5 "$limit" "${words[@]}" >"$logs/$name.md" 2>"$logs/$name.err" </dev/null &
  names+=("$name") pids[$name]=$! starts[$name]=$SECONDS limits[$name]=$limit
}
# Waits for all that has begun, but for those named, and puts it into the report in that order.
finish() {
  local name status kept=()
  for name in ${names[@]+"${names[@]}"}; do
    if [[ " $* " == *" $name "* ]]; then
      kept+=("$name")
      continue
    fi
    status=0
    wait "${pids[$name]}" || status=$?
    tell "$name" "$status" $((SECONDS - starts[$name]))
    unset "pids[$name]"
  done
  names=(${kept[@]+"${kept[@]}"})
}
tell() {  # tell NAME STATUS SECONDS
  local how=ok
  case $2 in
    0) ;;
    124 | 137) how="HUNG, ended after ${limits[$1]} s" failed=$((failed > 0 ? failed : 1)) ;;
    *) how="FAILED (status $2)" failed=$((failed > 0 ? failed : 1)) ;;
  esac
  say '' "## $1: $how, $3 s" ''
  head -c 60000 "$logs/$1.md" | tee -a "$report"
  [[ $2 == 0 ]] || { printf '```\n' && tail -n 15 "$logs/$1.err" | cut -c 1-400 && printf '```\n'; } | tee -a "$report"
}
bench() {  # bench NAME LIMIT PART OPTIONS...: of gpu.py
  begin "$1" "$2" "$python" "$root/bench/gpu.py" "$3" --binary "$build/bin/tessera" --python "$python" --logs "$logs/$1" \
    --work "$work" --seconds @LEFT "${@:4}"
}
tests() {  # tests NAME LIMIT PART OPTIONS...: of gpu_tests.py
  begin "$1" "$2" "$python" "$root/bench/gpu_tests.py" "$3" --build "$build" --logs "$logs/$1" --seconds @LEFT "${@:4}"
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

asked() { [[ " $parts " == *" $1 "* ]]; }
# PyTorch compiles beside the tests, if both are asked for, and waits for a file before it is timed.
begin_pytorch() {
  bench pytorch 330 pytorch --models gpt2,llama,gpt2-medium=bf16/default --rounds 3 --limit 40 --compile-limit 200 --go "$work/go"
}
first_runs() {
  begin versions 30 bash -c versions
  begin libraries 20 bash -c libraries
  bench first_runs 90 ladder --models small --limit 40
  finish
  grep -qsE '^\| [^|]+ \| [0-9][0-9,]+ \|' "$logs/first_runs.md" || failed=3  # no run of the table has a rate
}
right() {
  ! asked pytorch || begin_pytorch
  local OMP_NUM_THREADS=2  # of all that now runs side by side
  export OMP_NUM_THREADS
  tests tests 110 tests --limit 90 --fixture-limit 30 --tool-limit 30 --filter '*Gpu*-CudnnGpu.*'
  # cuDNN compiles a plan for each shape, at a tenth to half of a second each: in a process of their own.
  begin cudnn_tests 110 "$build/tests/test_tensor" --gtest_filter='CudnnGpu.*' --gtest_color=no
  bench verify 110 strategies --models small --jobs 4 --limit 40 --untrained
  OMP_NUM_THREADS=1 bench losses_small 60 curve --models small --limit 30 --cpu-limit 50
  OMP_NUM_THREADS=3 bench losses 110 curve --models gpt2 --limit 40 --cpu-limit 100
  ! asked tuning || make_bases
  finish pytorch
}
make_bases() { bench bases 80 bases --models gpt2,llama-1b --limit 70; }
pytorch() {
  [[ -n ${pids[pytorch]:-} ]] || begin_pytorch
  : >"$work/go"
  finish
}
kernels() { bench kernels 50 kernels --limit 45 && finish; }
strategies() {
  bench strategies 75 strategies --rounds 1 --steps 8 --limit 20 --unverified --only \
    "tensor;tensor and sequence;context, ring;context, Ulysses;one of 4 experts;DDP;ZeRO-1;ZeRO-3;1F1B;ZB-H1" && finish
}
strategy_kernels() {
  bench strategy_kernels 75 strategy_kernels --limit 30 --only "tensor;tensor and sequence;context, ring;one of 4 experts" && finish
}
shapes() {
  bench shapes 75 shapes --models gpt2,llama,llama-experts,gpt2-8k,gpt2-32k,gpt2-medium,llama-1b --rounds 1 --steps 10 --limit 30 && finish
}
tuning() {
  [[ -d $work/base-gpt2 ]] || { make_bases && finish; }
  bench tuning 90 tuning --models gpt2,llama-1b --steps 10 --limit 45 && finish
}
ways() { bench ways 45 ways --rounds 1 --limit 30 --steps 15 && finish; }
ops() { bench ops 30 ops --limit 28 && finish; }
sanitizer() {
  tests sanitizer 75 sanitizer --tools racecheck,memcheck --over attention,norms,cross-entropy --jobs 6 --tool-limit 70 --must && finish
}

pack_up() {
  local archive=$out/first_contact_$what.tar.gz with=(caches)
  rm -rf "$work" "$archive"*
  [[ $what != all ]] || with=()  # nothing comes after it
  tar -C "$out" -czf "$archive" "report_$what.md" "logs_$what" ${with[@]+"${with[@]}"}
  if (($(stat -c %s "$archive") > 15000000)); then
    head -c 90000000 "$archive" | split -b 15000000 - "$archive." && rm "$archive"
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
printf '# %s, %s, commit %s\n' "$parts" "$(date -u +%FT%TZ)" "$(cat "$root/COMMIT" 2>/dev/null || echo unknown)" >"$report"
if ! timeout -k 5 30 nvidia-smi -L >"$logs/card.md" 2>&1; then
  say '' "no GPU: $(tail -n 1 "$logs/card.md")"
  exit 2
fi
source "$root/bench/gpu_libraries.sh"
mend_libraries
for part in $parts; do
  "$part"
  ((failed < 3)) || break
done
say '' "$what took $SECONDS s of $whole; $( ((failed)) && echo 'something failed' || echo 'nothing failed'); $unrun steps were not run"
exit $failed
