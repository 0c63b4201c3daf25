#!/usr/bin/env bash
# What the first tests did not see, class by class, each with the tests that see it now: tests/seen.sh BUILD.
# Takes two minutes on two cores; ends with status 1 when a class is not seen.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
build=${1:?usage: tests/seen.sh BUILD, a folder that cmake made}
failed=0

# class NAME TEST=FILTER...: runs the tests of test_TEST that a filter names; there must be some.
class() {
  local name=$1 start=$SECONDS passed=0 log one
  shift
  log=$(mktemp)
  for one; do
    (cd "$build" && "tests/test_${one%%=*}" --gtest_brief=1 --gtest_filter="${one#*=}") >>"$log" 2>&1 || passed=1
    grep -q '\[  PASSED  \] 0 tests' "$log" && passed=1
  done
  if ((passed != 0)); then
    failed=1
    cat "$log"
  fi
  printf '%-62s %-6s %4d s\n' "$name" "$( ((passed == 0)) && echo seen || echo FAILED)" $((SECONDS - start))
  rm -f "$log"
}

class "ranks that were told other things, copies that drift" app='OneRunTest.Processes*' train='CheckReplicas.*'
class "two runs in one folder, a folder that moves" app='OneRunTest.ASecond*:*AFolder*:*AnotherRun*'
class "another text with the same ids" app='OneRunTest.AnotherText*'
class "devices, pipes, links and names of temporary files" app='OutputPlacesTest.*'
class "memory and threads that are not there" app='Memory.*' train='MemoryLimits.*:MemoryCheck.*:RankMemory.*'
class "signals in every command" app='SignalsTest.*'
class "weights that are not finite" app='OneRunTest.Weights*:*APoisoned*' train='FirstNotFinite.*'
class "saves in the background, the best that stays" app='OneRunTest.TheNewest*:*SavesIn*' data='CheckpointTest.TheBest*:*InParts*'
class "files that change, numbers at their ends, messages" app='ChangedFilesTest.*'
class "who is waited for, and what was done last" parallel='Flight.*:Reminder.*:LongWaits.*' app='Flight*' train='*traggler*'
class "validation" train='ValidationTest.*' app='ValidationOfRunsTest.*'
class "figures" app='Figures*'
class "rows of asynchronous workers" train='AsyncWorkers.*' app='AsyncRowsTest.*'
class "rounding" tensor='Rounding*' autograd='Rounding*' nn='Rounding*' parallel='Rounding*'
class "extremes of kernels" tensor='*Extremes*' parallel='Extremes*'
class "sampling" models='Window*'
class "growth" train='Growth.*'
class "the judge" verify='Bounds.*:PlantedErrors.*'
class "order and waiting" parallel='Waiting.*' data='FlushTest.*'
exit $failed
