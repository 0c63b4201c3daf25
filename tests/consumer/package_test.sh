#!/usr/bin/env bash
# package_test.sh BUILD WORK: packs BUILD with cpack and uses archive and .deb without a checkout: the program, a puzzle, an
# exercise, the library and the wheel. Status 77: cpack lacks a tool.
set -euo pipefail
build=$1 work=$2
fail() { printf '%s\n' "$*" >&2; exit 1; }
export TESSERA_PYTHON=${TESSERA_PYTHON:-python3}
"$TESSERA_PYTHON" -c 'import flit_core' || exit 77
command -v dpkg-shlibdeps >/dev/null || exit 77

rm -rf "$work"
mkdir -p "$work/un packed" "$work/deb"
(cd "$build" && cpack -G 'TGZ;DEB' -B "$work" -D CPACK_DEBIAN_COMPRESSION_TYPE=gzip) >"$work/cpack.log" 2>&1 || { tail -n 30 "$work/cpack.log"; exit 1; }
tar -xf "$work"/tessera-*.tar.gz -C "$work/un packed" --strip-components 1
dpkg-deb -x "$work"/tessera_*.deb "$work/deb"
depends=$(dpkg-deb -f "$work"/tessera_*.deb Depends)
[[ $depends == *"g++ (>= 4:"* && $depends == *libdnnl* ]] || fail "the .deb depends on $depends"

used() { (cd "$work" && env -i HOME="$work" PATH=/usr/bin:/bin "$@"); }  # no environment, no checkout
for root in "un packed" deb/usr; do
  tessera="$work/$root/bin/tessera"
  rm -rf "$work"/my-*
  used "$tessera" train --steps 3 --layers 1 --channels 16 --heads 1 --ranks 2 --no-save --no-eval --quiet
  used "$tessera" lab start p1 my-p1 && used "$tessera" lab start ring my-ring
  # The initial file compiles, links and runs; its first function is not implemented.
  verdict=$(used "$tessera" lab check ring my-ring) && fail "an unwritten exercise is solved: $verdict"
  [[ $verdict == *"not written yet: reduce_scatter"* ]] || fail "of an unwritten exercise: $verdict"
  (cd "$work/$root" && ls include | grep -qx tessera && ls lib/cmake/tessera/tessera-config.cmake share/doc/tessera/copyright \
    share/doc/tessera/docs/notebooks/1-the-proof.ipynb) >/dev/null
  [[ $("$TESSERA_PYTHON" -m zipfile -l "$work/$root"/share/tessera/tessera-*.whl) == *tessera/results.py* ]]
done
# All libraries except the C and C++ runtime are loaded from the archive, which runs without the packages.
foreign=$(ldd "$work/un packed/bin/tessera" | grep -vE "=> $work/un packed/|linux-vdso|ld-linux|lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt|resolv)\.so" || true)
[[ -z $foreign ]] || fail "the archive lacks: $foreign"
