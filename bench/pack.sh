#!/usr/bin/env bash
# A build of the program and its tests to carry to a machine with a GPU that has not the packages to build them: stripped,
# with the shared libraries that they need beside them, but for CUDA's, cuDNN's, NCCL's and the C and C++ runtimes, which
# are that machine's own. Without MPI, whose programs a machine has or has not.
#
# usage: bench/pack.sh [--architecture 90a] [--build DIR] FILE.tar.xz [-- OPTIONS OF CMAKE]
#   there:  tar xf FILE.tar.xz && tessera-gpu/bench/gpu.sh --build tessera-gpu/build
# --architecture is the card's compute capability (default 90a, Hopper), --build where to compile (default build/packed).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/packed architecture=90a file= options=()

die() {
  echo "pack.sh: $1" >&2
  exit 2
}
while (($#)); do
  case $1 in
    --architecture) architecture=${2:?--architecture wants a number such as 80 or 90a} && shift ;;
    --build) build=$(realpath -m "${2:?--build wants a folder}") && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    --) options=("${@:2}") && break ;;
    -*) die "unknown option '$1'; see --help" ;;
    *) file=$(realpath -m "$1") ;;
  esac
  shift
done
[[ $file == *.tar.xz ]] || die "where to? expected the name of a file that ends in .tar.xz, found '$file'"
[[ -d $(dirname "$file") ]] || die "no such folder: $(dirname "$file")"

suites=(tensor autograd nn parallel verify app)
programs=(bin/tessera "${suites[@]/#/tests/test_}")
mkdir -p "$build"
# old rpath tags, which libraries of libraries are looked for by too
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON -DTESSERA_MPI=OFF \
  -DCMAKE_CUDA_ARCHITECTURES="$architecture" '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib' \
  -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags "${options[@]}" >"$build/configured" 2>&1 ||
  { tail -n 20 "$build/configured" >&2 && die "the build could not be configured"; }
grep -E '^-- (CUDA|NCCL|cuDNN)' "$build/configured"
cmake --build "$build" -j "$(nproc)" --target tessera "${suites[@]/#/test_}"

work=$(mktemp -d)
trap 'rm -rf "$work" "$file.part"' EXIT
packed=$work/tessera-gpu
mkdir -p "$packed"/build/{bin,tests,lib}
git -C "$root" archive HEAD bench tests/compare tests/support | tar -x -C "$packed"
git -C "$root" describe --always --dirty >"$packed/COMMIT"
theirs='^(libcuda|libcudart|libcublas|libcudnn|libnccl|libnv|ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.)'
for program in "${programs[@]}"; do
  strip -o "$packed/build/$program" "$build/$program"
  ldd "$build/$program" | awk '$2 == "=>" && $3 == "not" { print "pack.sh: not found here: " $1 > "/dev/stderr"; exit 1 }
    $2 == "=>" { print $1, $3 }' | while read -r name path; do
    [[ $name =~ $theirs ]] || cp -L "$path" "$packed/build/lib/$name"
  done
done
tar -C "$work" -cf - tessera-gpu | xz -T0 -6 >"$file.part"
mv "$file.part" "$file"
printf '%s: %d MiB, commit %s, compute capability %s, with\n' "$file" $(($(stat -c %s "$file") >> 20)) "$(cat "$packed/COMMIT")" \
  "$architecture"
ls "$packed/build/lib"
