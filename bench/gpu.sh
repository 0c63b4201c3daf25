#!/usr/bin/env bash
# Everything that needs a GPU, in one go and into one report: the build, the tests that are skipped elsewhere, NVIDIA's
# checker, every strategy with its ranks on the one card, the CPU's loss curve, the ops, and PyTorch in turns.
#
# usage: bench/gpu.sh [--small] [--models LIST] [--settings LIST] [--rounds N] [--seconds S] [--tools LIST] [--limit S]
#                     [--build DIR] [--report FILE] [PART...]
#   PART      build tests sanitizer strategies curve ops pytorch; without any: all, in this order. One alone fits where
#             time is lent in pieces; parts are added to the report.
#   --build   the build folder (default build/cuda); one that bench/pack.sh made elsewhere for this card needs no part build
#   --models  those of the part pytorch (default gpt2,gpt2-medium,gpt2-xl); each takes minutes to be compiled there
#   --settings  of PyTorch's to try for the part pytorch, such as bf16/default,autocast/max-autotune (default all six)
#   --rounds  of the parts strategies and pytorch (default 5)
#   --seconds after which these begin no further round (default: none); the tables say how many there were
#   --tools   those of the part sanitizer (default memcheck,racecheck,synccheck,initcheck)
#   --limit   seconds for each of these tools over one of its three test programs (default 900, small 40)
#   --small   tiny models and few rounds: minutes, to see that everything works
# TESSERA_PYTHON names the interpreter that has torch (default python3). Ends with 1 when a test or a strategy fails.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/cuda report=gpu-report.md options=() small=() rounds='' steps=30 parts=()
tools=memcheck,racecheck,synccheck,initcheck limit=''
all=(build tests sanitizer strategies curve ops pytorch)

exec 3>&2

die() {
  echo "gpu.sh: $1" >&2
  exit "${2:-2}"
}

while (($#)); do
  case $1 in
    --small) small=(--small) steps=3 ;;
    --models) options+=(--models "${2:?--models wants a list such as gpt2,gpt2-medium}") && shift ;;
    --settings) options+=(--settings "${2:?--settings wants a list such as bf16/default}") && shift ;;
    --rounds) rounds=${2:?--rounds wants a number} && shift ;;
    --seconds) options+=(--seconds "${2:?--seconds wants a number}") && shift ;;
    --tools) tools=${2:?--tools wants a list such as memcheck,racecheck} && shift ;;
    --limit) limit=${2:?--limit wants a number of seconds} && shift ;;
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
rounds=${rounds:-$((${#small[@]} ? 1 : 5))} limit=${limit:-$((${#small[@]} ? 40 : 900))}
for number in "$rounds" "$limit"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || die "--rounds, --limit: expected a whole number of at least 1, found '$number'"
done
IFS=, read -ra tools <<<"$tools"
for tool in "${tools[@]}"; do
  [[ " memcheck racecheck synccheck initcheck " == *" $tool "* ]] ||
    die "--tools: unknown '$tool'; expected some of memcheck,racecheck,synccheck,initcheck"
done
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
# How many findings a log has. Of initcheck those in our kernels and in copies: a library may read what it does not use.
findings() {  # findings TOOL LOG
  if [[ $1 == initcheck ]]; then
    awk '/^========= .*[Uu]ninitialized/ { if (/Host API/) found++; else waits = 1; next }
      waits && /^========= +at / { found += /tessera/; waits = 0 }
      END { print found + 0 }' "$2"
  else
    grep '^========= [^ ]' "$2" | grep -Evc 'COMPUTE-SANITIZER|SUMMARY|process didn|Target application' || true
  fi
}
# One tool over one program. Our kernels alone are checked, which are all in the namespace tessera; but for initcheck, to
# which memory that another kernel has written would be unwritten. ProductsGpu.* is cuBLASLt's kernels.
sanitize() {
  local tool=$1 binary=$2 log=$report.$1.$2 status=0 only=(--kernel-name kns=tessera) start=$SECONDS passed verdict
  [[ $tool != initcheck ]] || only=()
  timeout -k 10 "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --report-api-errors no "${only[@]}" \
    "$build/tests/test_$binary" --gtest_filter='*Gpu*-ProductsGpu.*' >"$log" 2>&1 || status=$?
  passed=$(grep -c '^\[       OK ' "$log" || true)
  if ((status == 0)) && ((passed > 0)); then
    verdict=clean
  elif [[ $tool == initcheck && $status == 9 && $(findings initcheck "$log") == 0 ]] && ! grep -q '^\[  FAILED' "$log"; then
    verdict="clean but for libraries' kernels, see $log" status=0
  elif ((status != 9 && SECONDS - start >= limit)) && [[ $(findings "$tool" "$log") == 0 ]]; then
    verdict="NOT FINISHED in $limit s, nothing found so far" status=0
  else
    verdict="FAILED (status $status), see $log" status=1
  fi
  echo "- $tool, test_$binary: $verdict; $passed tests passed"
  return $status
}
run_sanitizer() {
  local tool binary sanitizer result=0
  sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) || {
    echo "NOT RUN: compute-sanitizer is not on PATH"
    return "$named"  # 1 where it was asked for by name
  }
  for tool in "${tools[@]}"; do
    for binary in tensor autograd nn; do sanitize "$tool" "$binary" || result=1; done
  done
  return $result
}
# The table goes into the report; figures as they come, and what fails, to the terminal and into a file beside it.
run_gpu_py() {
  "$python" "$root/bench/gpu.py" "$1" --binary "$build/bin/tessera" --rounds "$rounds" --steps "$steps" "${small[@]}" \
    "${options[@]}" 2> >(tee -a "$report.rounds" >&3) && return
  echo "FAILED, see $report.rounds"
  return 1
}

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
