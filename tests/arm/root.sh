#!/usr/bin/env bash
# root.sh DIR: downloads the 64-bit Arm headers and libraries for a build with cmake/arm64.cmake and unpacks them into
# DIR: Debian's packages of packages.txt and their dependencies, except MPI, which that build does not use (25 MB).
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
root=$(realpath -m "${1:?root.sh DIR}")
mapfile -t names < <(sed -n 's/^\(\(lib\|nlohmann\|zlib\)[^ ]*-dev\) .*/\1/p' "$here/../../packages.txt" | grep -v openmpi)
mkdir -p "$root" "$root.debs"/{,lists/}partial
from=(-o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::Lists="$root.debs/lists" -o Dir::State::Status=/dev/null
  -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Dir::Cache::Archives="$root.debs")
apt-get -q "${from[@]}" update
apt-get -q "${from[@]}" install -y --no-install-recommends --print-uris "${names[@]}" libc6-dev libgomp1 libstdc++6 |
  sed -n "s/^'\([^']*\)'.*/\1/p" >"$root.debs/uris"
(cd "$root.debs" && xargs -P 4 -n 8 curl -fsS --remote-name-all <uris)
for package in "$root.debs"/*.deb; do dpkg-deb -x "$package" "$root"; done
