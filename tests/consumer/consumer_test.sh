#!/usr/bin/env bash
# Tests docs/library.md: an external project finds Tessera, sees only <tessera/...>, builds the examples and runs them.
#   consumer_test.sh installed BUILD WORK GENERATOR [CMAKE ARGS]     installs BUILD under WORK
#   consumer_test.sh subdirectory BUILD WORK GENERATOR [CMAKE ARGS]  uses the sources: compiles but does not link,
#                                                                    which would rebuild all of them
set -euo pipefail

how=$1 build=$2 work=$3 generator=$4
shift 4
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
fail() { printf '%s\n' "$*" >&2; exit 1; }

mkdir -p "$work"
examples=(mlp own_model own_op own_strategy train_gpt) targets=("${examples[@]}")
if [[ $how == installed ]]; then
  rm -rf "$work/installed"
  cmake --install "$build" --prefix "$work/installed" >/dev/null
  [[ $(ls "$work/installed/include") == tessera ]] || fail "include/ of an installed copy holds: $(ls "$work/installed/include")"
  set -- "-DCMAKE_PREFIX_PATH=$work/installed" "$@"
else
  set -- "-DTESSERA_SOURCE=${here%/tests/consumer}" "$@"
  targets=(compiled)
fi

cmake -S "$here" -B "$work" -G "$generator" "$@" >"$work/consumer.log" 2>&1 || { cat "$work/consumer.log"; exit 1; }
# Allowed compile options of a user's file: its own, Tessera's definitions, and one include directory.
line=$(grep -m 1 -E '"command": .*/examples/mlp[.]cpp' "$work/compile_commands.json")
extra=$(tr ' ' '\n' <<<"$line" | grep -E '^-(I|f|W|march|pthread)' || true)
[[ -z $extra ]] || fail "a user's file is compiled with $extra"
directory=$(grep -oE -- '-isystem [^ ]+' <<<"$line" | sort -u | cut -d' ' -f2)
cmake --build "$work" -j 2 --target "${targets[@]}" >>"$work/consumer.log" 2>&1 || { tail -n 40 "$work/consumer.log"; exit 1; }
[[ $(ls "$directory") == tessera ]] || fail "a user's file sees in $directory: $(ls "$directory")"
[[ $how == installed ]] || exit 0
for example in "${examples[@]}"; do "$work/$example"; done
