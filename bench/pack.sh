#!/usr/bin/env bash
# Packs a build of the program and its tests for a GPU machine without build packages: stripped, with the required shared
# libraries except CUDA, cuDNN, NCCL and the C and C++ runtimes, which that machine provides. Without MPI. Self-contained: the
# pack includes the scripts of its commit.
#
# usage: bench/pack.sh [--architectures '80;90-real'] [--double] [--build DIR] FILE.tar.xz [-- OPTIONS OF CMAKE]
#   on the GPU machine:  tar xf FILE.tar.xz && tessera-gpu/bench/first_contact.sh all OUT
# --architectures: GPU architectures; default: machine code for compute capability 8.0 and 9.0, and PTX of 8.0 for later GPUs.
# --double: includes float64 kernels (a third of the compile time); without them, tests that need them are skipped.
# --build: build directory (default build/packed). TESSERA_PYTHON: interpreter whose packages contain cudnn-frontend, or cuDNN
# and NCCL.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/packed architectures='80;90-real' double=OFF file='' options=()

die() {
  echo "pack.sh: $1" >&2
  exit "${2:-2}"
}
while (($#)); do
  case $1 in
    --architectures) architectures=${2:?--architectures: expected a list such as '80;90-real'} && shift ;;
    --double) double=ON ;;
    --build) build=$(realpath -m "${2:?--build: expected a directory}") && shift ;;
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    --) options=("${@:2}") && break ;;
    -*) die "unknown option '$1'; see --help" ;;
    *) file=$(realpath -m "$1") ;;
  esac
  shift
done
[[ $file == *.tar.xz ]] || die "expected an output file that ends in .tar.xz, got '$file'"
[[ -d $(dirname "$file") ]] || die "no such directory: $(dirname "$file")"

mkdir -p "$build"
# The layers are shared libraries, so that seven programs share one copy of the kernels. The run path is a DT_RPATH, which also
# applies to transitive libraries; it names only the pack's directory.
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_CUDA=ON -DTESSERA_MPI=OFF -DTESSERA_CUDNN=ON \
  -DTESSERA_FLOAT64_KERNELS="$double" -DTESSERA_NCCL=ON -DCMAKE_CUDA_ARCHITECTURES="$architectures" -DBUILD_SHARED_LIBS=ON \
  -DTESSERA_TEST_FILES="$(cd "$root" && grep -l Gpu tests/*/*_test.cpp | paste -sd ';')" \
  -DCMAKE_CXX_FLAGS=-fno-semantic-interposition -DCMAKE_LIBRARY_OUTPUT_DIRECTORY="$build/lib" \
  -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN/../lib' -DCMAKE_INSTALL_RPATH_USE_LINK_PATH=OFF \
  -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--disable-new-dtags \
  "${options[@]}" >"$build/configured" 2>&1 || {
  tail -n 20 "$build/configured" >&2
  echo 'pack.sh: a pack requires cuDNN and NCCL. Install them with' \
    '"pip install --no-deps nvidia-cudnn-frontend==1.32.0 nvidia-cudnn-cu13==9.28.1.4 nvidia-nccl-cu13==2.32.3" and set TESSERA_PYTHON to that' \
    'interpreter, or specify their locations after --: -DCUDNN_ROOT=DIR -DCUDNN_FRONTEND_ROOT=DIR -DNCCL_ROOT=DIR' >&2
  die "the build could not be configured"
}
grep -E '^-- (CUDA|NCCL|cuDNN)' "$build/configured"
mapfile -t suites < <(ctest --test-dir "$build" -N -L '^gpu$' | sed -n 's/^ *Test *#[0-9]*: //p')
((${#suites[@]} > 0)) || die 'no test has the label "gpu"' 1
programs=(bin/tessera "${suites[@]/#/tests/test_}")
cmake --build "$build" -j "$(nproc)" --target tessera "${suites[@]/#/test_}"

work=$(mktemp -d)
trap 'rm -rf "$work" "$file.part"' EXIT
packed=$work/tessera-gpu
mkdir -p "$packed"/build/{bin,tests,lib}
git -C "$root" archive HEAD bench tests/compare tests/support LICENSE | tar -x -C "$packed"
git -C "$root" describe --always --dirty >"$packed/COMMIT"
theirs='^(libcuda|libcudart|libcublas|libcudnn|libnccl|libnv|ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.)'
missing=0
for program in "${programs[@]}"; do
  strip -o "$packed/build/$program" "$build/$program"
  while read -r name _ path _; do
    if [[ $name =~ $theirs ]]; then
      continue
    elif [[ $path == not ]]; then
      echo "pack.sh: $name is missing on this machine; $program requires it" >&2
      missing=1
    else
      cp -L "$path" "$packed/build/lib/$name"
    fi
  done < <(ldd "$build/$program" | grep ' => ')
done
((missing == 0)) || die "a library is missing" 1
strip --strip-unneeded "$packed"/build/lib/*

# A run path to a directory of this machine would precede LD_LIBRARY_PATH and hide the GPU machine's libraries.
for binary in "$packed"/build/{bin,tests,lib}/*; do
  paths=$(readelf -d "$binary" | sed -n 's/.*(\(RPATH\|RUNPATH\)).*\[\(.*\)\]/\2/p')
  ours=$([[ $binary != */lib/* || $binary == */libtessera_* ]] && echo yes || true)
  [[ $paths == '$ORIGIN/../lib' || (-z $paths && -z $ours) ]] ||
    die "$(basename "$binary") has the run path '$paths'; expected only \$ORIGIN/../lib" 1
done
# The packed program starts without this machine's environment, trains on a CPU, and reports a missing GPU in one line.
bare() {
  env -i TESSERA_CACHE="$work/cache" LD_LIBRARY_PATH="$LD_LIBRARY_PATH" CUDA_VISIBLE_DEVICES='' "$packed/build/bin/tessera" "$@" 2>&1
}
LD_LIBRARY_PATH=$(cd "$root/bench" && "${TESSERA_PYTHON:-python3}" -c 'import gpu_run; print(gpu_run.library_path())')
bare --help >/dev/null || die "the packed program does not start: $(bare --help)" 1
for device in cpu cuda; do
  said=$(cd "$work" && bare train --device $device --ranks 1 --tokenizer bytes --data "$root/README.md" --layers 1 --channels 32 \
    --heads 2 --context 16 --batch 1 --steps 1 --no-save --no-eval --out "$work/run") || true
  [[ $said == *"After 1 steps"* || ($device == cuda && $said == 'tessera: --device cuda: '*) ]] ||
    die "the packed program does not train with --device $device: ${said: -300}" 1
done
rm -rf "$work/run"

tar -C "$work" --owner=0 --group=0 -cf - tessera-gpu | xz -T0 -6 >"$file.part"
mv "$file.part" "$file"
printf '%s: %.1f MB, commit %s, for %s, with\n' "$file" "$(stat -c %s "$file" | awk '{ print $1 / 1e6 }')" \
  "$(cat "$packed/COMMIT")" "$architectures"
(cd "$packed/build" && du -h --apparent-size bin/* tests/* lib/*)
