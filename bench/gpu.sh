#!/usr/bin/env bash
# Everything that needs a GPU, in one go and into one report: the build, the tests that are skipped elsewhere, NVIDIA's
# checker, every strategy with its ranks on the one card, the CPU's loss curve, the ops, and PyTorch in turns.
#
# usage: bench/gpu.sh [OPTIONS] [PART...]
#   PART      build tests sanitizer ladder ways kernels strategies curve ops pytorch; without any: all, in this order. One
#             alone fits where a machine is rented for minutes; parts are added to the report.
#   --build DIR      the build folder (default build/cuda); one of bench/pack.sh needs no part build
#   --report FILE    (default gpu-report.md); all logs lie in FILE.logs, report and logs together in FILE.tar.gz
#   --small          tiny models and few rounds: minutes, to see that everything works
#   --limit PART=S   seconds of a part; what it has not come to by then is named in its table. Defaults: build 3600,
#                    tests 1800, sanitizer 7200, ladder 600, ways 900, kernels 600, strategies 3600, curve 1800, ops 900, pytorch 10800;
#                    with --small a third
#   --tests OPTION=V, --bench OPTION=V   handed on to bench/gpu_tests.py (parts tests, sanitizer) and to bench/gpu.py (ladder,
#                    ways, kernels, strategies, curve, pytorch), which list their options with --help: limits of single runs, suites,
#                    tools; models, batch, rounds, steps, settings. Such as --tests limit=120 --bench models=gpt2
# TESSERA_PYTHON names the interpreter that has torch (default python3). Every process runs under a limit. Ends with 1 when a
# part fails.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/cuda report=gpu-report.md small='' parts=() failed=() for_bench=() for_tests=()
all=(build tests sanitizer ladder ways kernels strategies curve ops pytorch)
declare -A limit=([build]=3600 [tests]=1800 [sanitizer]=7200 [ladder]=600 [ways]=900 [kernels]=600 [strategies]=3600 [curve]=1800 [ops]=900
  [pytorch]=10800) said=()

die() {
  echo "gpu.sh: $1" >&2
  exit "${2:-2}"
}
known() { [[ " ${all[*]} " == *" $1 "* ]] || die "unknown part '$1'; expected some of: ${all[*]}"; }
option() { [[ ${2:-} =~ ^[a-z-]+=.+$ ]] || die "$1: expected OPTION=VALUE, found '${2:-}'"; }

while (($#)); do
  case $1 in
    --small) small=1 ;;
    --build) build=$(realpath -m "${2:?--build wants a folder}") && shift ;;
    --report) report=${2:?--report wants a file} && shift ;;
    --limit)
      [[ ${2:-} =~ ^([a-z]+)=([1-9][0-9]*)$ ]] || die "--limit: expected PART=SECONDS, found '${2:-}'"
      known "${BASH_REMATCH[1]}"
      said[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]} && shift ;;
    --tests) option "$@" && for_tests+=("--$2") && shift ;;
    --bench) option "$@" && for_bench+=("--$2") && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) known "$1" && parts+=("$1") ;;
  esac
  shift
done
((${#parts[@]} == 0)) || for_tests+=(--must)  # a part that was asked for by name may not be left out
packed=''
[[ ! -d $build/lib ]] || packed=1
if ((${#parts[@]} == 0)); then
  parts=("${all[@]:${packed:-0}}")  # packed: built already
fi
for name in "${all[@]}"; do
  [[ -z $small ]] || limit[$name]=$((limit[$name] / 3))
  [[ -z ${said[$name]:-} ]] || limit[$name]=${said[$name]}
done
report=$(realpath -m "$report") && logs=$report.logs && mkdir -p "$logs"
python=${TESSERA_PYTHON:-python3}
if [[ -n $small ]]; then
  for_bench=(--small --rounds=1 --steps=3 "${for_bench[@]}")
  for_tests=(--tool-limit=40 "${for_tests[@]}")
fi
# The tests of several GPUs start the program where it was built.
[[ -z $packed ]] || for_tests=("--filter=*Gpu*" "${for_tests[@]}")
source "$root/bench/gpu_libraries.sh"

# part NAME TITLE COMMAND...: under the part's limit; its output goes into the report. A program that keeps to a time itself
# gets 15 seconds less, to end its tables.
part() {
  [[ " ${parts[*]} " == *" $1 "* ]] || return 0
  local status=0
  now=$1
  printf '\n=== %s\n' "$2"
  printf '\n## %s\n\n' "$2" >>"$report"
  timeout -k 10 "${limit[$1]}" "${@:3}" >"$logs/$1.md" 2>"$logs/$1.err" </dev/null &
  child=$!
  tail -q -f -s 0.2 --pid=$child -n +1 "$logs/$1.md" "$logs/$1.err" 2>/dev/null &
  wait $child || status=$?
  wait $! || true
  child=''
  if ((status == 124 || status == 137)); then
    printf '\nHUNG: ended after %s s\n' "${limit[$1]}" | tee -a "$logs/$1.md"
  elif ((status != 0)); then
    printf '\nFAILED (status %s) %s\n' "$status" "$(tail -n 1 "$logs/$1.err")" | tee -a "$logs/$1.md"
  fi
  cat "$logs/$1.md" >>"$report"
  ((status == 0)) || failed+=("$1")
}
seconds() { echo "--seconds=$((limit[$1] > 30 ? limit[$1] - 15 : limit[$1]))"; }
tests() { part "$1" "$2" "$python" "$root/bench/gpu_tests.py" "$1" --build="$build" --logs="$logs/$1" "$(seconds "$1")" "${for_tests[@]}"; }
bench() {
  part "$1" "$2" "$python" "$root/bench/gpu.py" "$1" --binary="$build/bin/tessera" --python="$python" --logs="$logs/$1" --work="$work" \
    "$(seconds "$1")" "${for_bench[@]}"
}
build_all() {
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON >"$logs/build.log" 2>&1 &&
    cmake --build "$build" -j "$(nproc)" >>"$logs/build.log" 2>&1 || { tail -n 20 "$logs/build.log" && return 1; }
  grep -E '^-- (CUDA|NCCL|MPI|cuDNN)' "$logs/build.log"
}
export -f build_all
export root build logs

if [[ ${parts[*]} != build ]]; then
  command -v nvidia-smi >/dev/null && timeout -k 5 20 nvidia-smi -L >/dev/null 2>&1 ||
    die "this machine shows no GPU (nvidia-smi); only the part 'build' needs none"
fi
work=$(mktemp -d)
pack_up() {  # also when it is ended from outside: what there is
  rm -rf "$work"
  tar -C "$(dirname "$report")" -czf "$report.tar.gz" "$(basename "$report")" "$(basename "$logs")"
}
ended() {
  if [[ -n $child ]]; then
    kill "$child" && wait "$child" || true
    { cat "$logs/$now.md" && printf '\nNOT FINISHED: ended from outside\n'; } >>"$report"
  fi
  exit 143
}
child='' now=''
trap pack_up EXIT
trap ended TERM INT
{
  printf '# %s\n\n' "$(date -u +%F)"
  ! command -v nvidia-smi >/dev/null || timeout -k 5 20 nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  ! command -v nvcc >/dev/null || nvcc --version | tail -n 2 | head -n 1
  printf 'commit %s\n' "$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)"
} >>"$report"
part build "Build" bash -c build_all
tests tests "Tests on the GPU"
tests sanitizer "compute-sanitizer"
bench ladder "First runs"
bench ways "Ways of one rank"
bench kernels "Kernels of a queued step"
bench strategies "Strategies, ranks sharing the card"
bench curve "Loss beside the CPU's"
part ops "Ops" "$build/bin/tessera" bench --device cuda --benchmark_filter=^op/
bench pytorch "Training beside PyTorch"
((${#failed[@]} == 0)) || die "failed: ${failed[*]}; the report is $report, with the logs in $report.tar.gz" 1
echo "the report is $report, with the logs in $report.tar.gz"
