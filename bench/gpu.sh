#!/usr/bin/env bash
# Everything that needs a GPU, in one go and into one report: the build, the tests that are skipped elsewhere, NVIDIA's
# checker, every strategy with its ranks on the one card, the CPU's loss curve, the ops, and PyTorch in turns.
#
# usage: bench/gpu.sh [--small] [--models LIST] [--build DIR] [--report FILE] [PART...]
#   PART      build tests sanitizer strategies curve ops pytorch; without any: all, in this order. One alone fits where
#             time is lent in pieces; parts are added to the report.
#   --build   the build folder (default build/cuda); one that bench/pack.sh made elsewhere for this card needs no part build
#   --models  those of the part pytorch (default gpt2,gpt2-medium,gpt2-xl); each takes minutes to be compiled there
#   --small   tiny models and few rounds: minutes, to see that everything works
# TESSERA_PYTHON names the interpreter that has torch (default python3). Ends with 1 when a test or a strategy fails.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/cuda report=gpu-report.md models=() small=() rounds=5 steps=30 parts=()
all=(build tests sanitizer strategies curve ops pytorch)

die() {
  echo "gpu.sh: $1" >&2
  exit "${2:-2}"
}

while (($#)); do
  case $1 in
    --small) small=(--small) rounds=1 steps=3 ;;
    --models) models=(--models "${2:?--models wants a list such as gpt2,gpt2-medium}") && shift ;;
    --build) build=$(realpath -m "${2:?--build wants a folder}") && shift ;;
    --report) report=${2:?--report wants a file} && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) [[ " ${all[*]} " == *" $1 "* ]] || die "unknown part '$1'; expected some of: ${all[*]}" && parts+=("$1") ;;
  esac
  shift
done
named=1
if ((${#parts[@]} == 0)); then
  named=0
  parts=("${all[@]}")
  [[ ! -d $build/lib ]] || parts=("${all[@]:1}")  # packed: built already
fi
report=$(realpath -m "$report")
python=${TESSERA_PYTHON:-python3}
failed=()

# A packed build finds CUDA's libraries where PyTorch's are, so that both run on the same, or else in the toolkit.
if [[ -d $build/lib ]]; then
  wheels=$("$python" -c 'import glob, sysconfig; print(":".join(sorted(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib"))))' 2>/dev/null || true)
  export LD_LIBRARY_PATH=${wheels:+$wheels:}/usr/local/cuda/lib64:/usr/local/cuda/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi

wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }
part() {  # part NAME TITLE COMMAND...: its output goes into the report
  wants "$1" || return 0
  printf '\n=== %s\n' "$2"
  printf '\n## %s\n\n' "$2" >>"$report"
  "${@:3}" 2>&1 | tee -a "$report" || failed+=("$1")
}

build_all() {
  # compute capability 9.0 is compiled as 90a, whose instructions are Hopper's alone
  local card
  card=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
  [[ -z $card || $card == 90 ]] && card=90a
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$card" >"$report.build" &&
    cmake --build "$build" -j "$(nproc)" >>"$report.build" || { tail -n 20 "$report.build" && return 1; }
  grep -E '^-- (CUDA|NCCL|MPI|cuDNN)' "$report.build"
}
run_tests() {  # those that want a GPU; a suite of which none has found it has failed here
  local suite log passed skipped status=0 filter='*Gpu.*:GpusTest.*'
  [[ ! -d $build/lib ]] || filter='*Gpu.*'  # the others start the program where it was built
  for suite in tensor autograd nn parallel verify app; do
    log=$report.test_$suite
    "$build/tests/test_$suite" --gtest_filter="$filter" >"$log" 2>&1 || status=1
    passed=$(grep -c '^\[       OK .*Gpu' "$log" || true) skipped=$(grep -c '^\[  SKIPPED \] .* ms)$' "$log" || true)
    printf -- '- %s: %s passed, %s skipped' "$suite" "$passed" "$skipped"
    sed -n 's/^\[  FAILED  \] \([^ ,]*\).* ms)$/, FAILED \1/p' "$log" | tr -d '\n'
    grep -q '^\[  PASSED ' "$log" || printf ', ended early: %s' "$(tail -n 1 "$log")"
    if grep -q -e 'this machine has no GPU' -e 'a build without CUDA' "$log"; then status=1 && printf ', no GPU was found'; fi
    echo
  done
  return $status
}
run_sanitizer() {
  local tool binary log
  if ! command -v compute-sanitizer >/dev/null; then
    echo "NOT RUN: compute-sanitizer is not on PATH"
    return "$named"  # 1 where it was asked for by name
  fi
  for tool in memcheck racecheck synccheck initcheck; do
    for binary in tensor autograd nn; do
      log=$report.$tool.$binary
      if compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/tests/test_$binary" --gtest_filter='*Gpu*' >"$log" 2>&1; then
        echo "- $tool, test_$binary: clean"
      else
        echo "- $tool, test_$binary: FAILED, see $log" && return 1
      fi
    done
  done
}
run_gpu_py() { "$python" "$root/bench/gpu.py" "$1" --binary "$build/bin/tessera" --rounds "$rounds" --steps "$steps" "${small[@]}" "${models[@]}"; }

if [[ ${parts[*]} != build ]]; then
  command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 ||
    die "this machine shows no GPU (nvidia-smi); only the part 'build' needs none"
fi
{
  printf '# %s\n\n' "$(date -u +%F)"
  command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  command -v nvcc >/dev/null && nvcc --version | tail -n 2 | head -n 1
  printf 'commit %s\n' "$(cat "$root/COMMIT" 2>/dev/null || git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)"
} >>"$report"
part build "Build" build_all
part tests "Tests on the GPU" run_tests
part sanitizer "compute-sanitizer" run_sanitizer
part strategies "Strategies, ranks sharing the card" run_gpu_py strategies
part curve "Loss beside the CPU's" run_gpu_py curve
part ops "Ops" "$build/bin/tessera" bench --device cuda
part pytorch "Training beside PyTorch" run_gpu_py pytorch
((${#failed[@]} == 0)) || die "failed: ${failed[*]}; the report is $report" 1
echo "the report is $report"
