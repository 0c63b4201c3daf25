#!/usr/bin/env bash
# Kills examples/train_gpt.cpp at random steps, resumes it each time under another layout, and compares the final
# parameters and optimizer state bitwise with those of an undisturbed run. SIGINT saves and stops.
# The command line then reads and continues the run.
#   train_gpt_test.sh TRAIN_GPT TESSERA
set -euo pipefail

program=$1 tessera=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TESSERA_CACHE=$work/cache
fail() { printf '%s\n' "$*" >&2; exit 1; }

"$program" "$work/undisturbed" '{"dp": 2}' >"$work/log"
steps() {  # the steps that the killed run has recorded
  local count
  count=$(grep -c '"event":"step"' "$work/killed/metrics.jsonl" 2>/dev/null) || true
  echo "${count:-0}"
}
for plan in '{"dp": 2}' '{"pp": 2, "microbatches": 2}' '{"dp": 2, "zero": 3}' '{"microbatches": 2}'; do
  "$program" "$work/killed" "$plan" >>"$work/log" 2>&1 &
  child=$! target=$((RANDOM % 20 + $(steps)))
  while kill -0 "$child" 2>/dev/null && (($(steps) <= target)); do sleep 0.002; done
  kill -KILL "$child" 2>/dev/null || true
  wait "$child" 2>/dev/null || true
done
"$program" "$work/killed" '{"pp": 2, "dp": 2, "zero": 1}' >>"$work/log" 2>&1 || fail "$(cat "$work/log")"
grep -q ' [1-9][0-9]* steps done' "$work/log" || fail "no start continued a run: $(cat "$work/log")"
for file in model optimizer; do
  cmp "$work/undisturbed/checkpoints/step-60/$file.safetensors" "$work/killed/checkpoints/step-60/$file.safetensors" ||
    fail "$file: different bits"
done

# SIGINT ends a run after its step, with a checkpoint of that step, which the next start continues.
set -m  # background jobs do not ignore SIGINT
"$program" "$work/interrupted" '{"dp": 2}' >"$work/log" 2>&1 &
child=$!
until grep -q '"event":"step"' "$work/interrupted/metrics.jsonl" 2>/dev/null; do
  kill -0 "$child" || fail "$(cat "$work/log")"
  sleep 0.002
done
kill -INT "$child"
status=0
wait "$child" || status=$?
set +m
step=$(sed -n 's/^stopped after step \([0-9]*\) .*/\1/p' "$work/log")
((status == 130)) && [[ -n $step && -e $work/interrupted/checkpoints/step-$step/manifest.json ]] ||
  fail "status $status after SIGINT: $(cat "$work/log")"
"$program" "$work/interrupted" '{"dp": 2}' >"$work/log" 2>&1 || fail "$(cat "$work/log")"
cmp "$work/undisturbed/checkpoints/step-60/model.safetensors" \
  "$work/interrupted/checkpoints/step-60/model.safetensors" || fail "different bits after SIGINT"

"$tessera" generate "$work/undisturbed" --tokens 20 --dtype fp32 >/dev/null
"$tessera" train --resume --out "$work/killed" --steps 62 --quiet >/dev/null 2>"$work/log" || fail "$(cat "$work/log")"
[[ -e $work/killed/checkpoints/step-62/manifest.json ]] || fail "the command line did not continue the run"
