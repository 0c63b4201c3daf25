#!/usr/bin/env bash
# Tests of the launcher on a project of one source file in a directory with a space in its name, with a fake dpkg-query.
# Usage: launcher_test.sh PATH/TO/tessera
set -euo pipefail
launcher=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
home="$work/a checkout"
failures=0
checks=0

check() {  # check WHAT COMMAND...: counts the check, and reports it if COMMAND fails
  local what=$1
  shift
  checks=$((checks + 1))
  "$@" && return
  failures=$((failures + 1))
  printf 'FAILED: %s\n' "$what"
  sed 's/^/  | /' "$work/err" 2>/dev/null || true
}
silent_on() { ! grep -qF -- "$1" "$work/$2"; }
says() { grep -qF -- "$1" "$work/$2"; }
run() {  # run ARGS...: runs the launcher; output in out and err, exit status in $status
  status=0
  "$home/tessera" "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
}
expect_output() {  # expect_output WHAT TEXT: checks that a run prints exactly TEXT on standard output
  run
  check "$1" test "$(<"$work/out")" = "$2"
}
edit() { sleep 0.02; printf '%s\n' "$2" >"$home/$1"; }

mkdir -p "$home" "$work/bin" "$work/elsewhere"
cp "$launcher" "$home/tessera"
printf '# a comment\nninja-build  builds\nlibnowhere-dev  is missing\nlibother-dev  too\n' >"$home/packages.txt"
cat >"$home/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(mini LANGUAGES CXX)
file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/*.cpp)
add_executable(tessera ${sources})
add_executable(schedules main.cpp)
set_target_properties(tessera schedules PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
enable_testing()
add_test(NAME mini COMMAND tessera)
END
main='#include <cstdio>
#include <cstring>
int extra() __attribute__((weak));
int main(int n, char** v) {
  if (n > 2 && !strcmp(v[1], "read")) { FILE* f = fopen(v[2], "r"); return f ? putchar(fgetc(f)), 0 : 4; }
  for (int i = 1; i < n; ++i) printf("<%s>", v[i]);
  printf("first%d", extra ? extra() : 0);
}'
edit main.cpp "$main"
cat >"$work/bin/dpkg-query" <<'END'
#!/bin/sh
printf 'installed ninja-build\nnot-installed libother-dev\nconfig-files libnowhere-dev\n'
END
chmod +x "$work/bin/dpkg-query"
PATH=$work/bin:$PATH

TESSERA_NO_INSTALL=1 run train
check "missing packages exit 2, not $status" test "$status" = 2
check "missing packages are named" says "libnowhere-dev libother-dev" err
check "installed packages are not named" silent_on ninja-build err
check "nothing is said on standard output" test ! -s "$work/out"

printf '#!/bin/sh\necho installed ninja-build\n' >"$work/bin/dpkg-query"
printf 'ninja-build  builds\n' >"$home/packages.txt"
run train --out "x y"
check "the first build runs the program: exit $status" test "$status" = 0
check "arguments arrive whole, and nothing else on standard output" test "$(<"$work/out")" = "<train><--out><x y>first0"
check "the first build is announced" says "building" err

start=$(date +%s%N)
run again
took=$((($(date +%s%N) - start) / 1000000))
printf 'an up-to-date start took %d ms\n' "$took"
check "an up-to-date start takes under 3 s" test "$took" -lt 3000
check "an up-to-date start says nothing" test ! -s "$work/err"

for sign in '#' ';' '[' ']' '"' '\' '|' '<' '>'; do
  mkdir "$work/a${sign}b"
  cp "$home"/{tessera,packages.txt,CMakeLists.txt,main.cpp} "$work/a${sign}b"
  status=0
  "$work/a${sign}b/tessera" 2>"$work/err" || status=$?
  check "a directory with $sign in its name is refused: exit $status" test "$status" = 2
  check "and named: $sign" says "a${sign}b: the path contains one of # ; [ ] \" \\ | < >" err
  check "and nothing is made there" test ! -e "$work/a${sign}b/build"
done

ln -s "$home/tessera" "$work/link"
printf 'Z' >"$work/elsewhere/file.txt"
got=$(cd "$work/elsewhere" && "$work/link" read file.txt)
check "relative paths are the caller's, through a symbolic link too" test "$got" = Z

edit extra.cpp 'int extra() { return 7; }'
expect_output "an added file is noticed" first7
edit extra.cpp 'int extra() { return 8; }'
expect_output "an edited file is noticed" first8
rm "$home/extra.cpp"
expect_output "a removed file is noticed" first0
touch -d 2001-01-01 "$home/old.cpp"
printf 'int extra() { return 9; }\n' >"$work/old" && touch -d 2001-01-01 "$work/old" && cp -p "$work/old" "$home/old.cpp"
expect_output "an added file with an old date is noticed" first9
rm "$home/old.cpp"

edit main.cpp 'int main() { return }'
run
check "a failed build exits 1, not $status" test "$status" = 1
check "a failed build names its log" says "$home/build/release/launcher.log" err
check "a failed build does not run the old program" test ! -s "$work/out"
edit main.cpp "$main"

run schedules 4 8
check "schedules runs the program of that name" test "$(<"$work/out")" = "<4><8>first0"

run test -R mini
check "test ends with ctest's summary" says "100% tests passed" out

mv "$home" "$work/moved"
home=$work/moved
run x
check "a moved checkout is configured anew" test "$(<"$work/out")" = "<x>first0"

rm -rf "$home/build"
touch "$home/build"  # not writable even by root, because it is a file
run x
check "a checkout that cannot be written exits 6, not $status" test "$status" = 6
check "a checkout that cannot be written is said" says "cannot write" err
printf '%d passed, %d failed\n' $((checks - failures)) "$failures"
((failures == 0))
