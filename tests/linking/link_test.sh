#!/usr/bin/env bash
# Shows that a program contains nothing of the given libraries: its link command does not name them, the loader does not
# load them, and no function or variable that their archives define is in it.
#   link_test.sh PROGRAM LINK_COMMAND LIBRARY...
# LIBRARY: the file of a layer, or the name of another library, such as onig. LINK_COMMAND: a file with one argument per
# line (cmake/keep_link.sh).
set -euo pipefail

program=$1 command=$2
shift 2
fail() { printf '%s\n' "$*" >&2; exit 1; }
# Excludes weak symbols, because inline functions are defined in every file that uses them.
defined() { nm --defined-only "$1" 2>/dev/null | awk '$2 ~ /^[TDBR]$/ {print $3}' | sort -u; }

loaded=$(ldd "$program")
symbols=$(defined "$program")
[[ -n $symbols ]] || fail "$program: no symbols"
for library in "$@"; do
  name=$(basename "$library")
  name=${name#lib} name=${name%.a} name=${name%.so}
  ! grep -Eq "(^-l|(^|/)lib)${name}([.]|$)" "$command" || fail "the link command names $name: $(grep "$name" "$command")"
  ! grep -q "lib$name[.]so" <<<"$loaded" || fail "$program loads $name"
  [[ $library == *.a ]] || continue
  found=$(comm -12 <(echo "$symbols") <(defined "$library"))
  [[ -z $found ]] || fail "$program contains symbols of $name: $(head -3 <<<"$found" | c++filt)"
done
