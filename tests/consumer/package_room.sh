#!/usr/bin/env bash
# package_room.sh SUITE DIRECTORY: builds the package of HEAD in a debootstrap chroot of a Debian release (bookworm,
# trixie), then installs and uses it in a second, minimal one. Requires root.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
suite=$1 at=$(realpath -m "$2")
inside() {  # ROOM COMMAND
  chroot "$1" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive sh -ec "$2"
}
room() {
  debootstrap --variant=minbase "$suite" "$at/$1" http://deb.debian.org/debian >/dev/null
  mount -t proc proc "$at/$1/proc"
  inside "$at/$1" 'apt-get -q update >/dev/null'
}
trap 'umount "$at"/*/proc' EXIT
room build
mkdir "$at/build/tessera"
git -C "$root" archive HEAD | tar -x -C "$at/build/tessera"
inside "$at/build" "apt-get -q install -y --no-install-recommends dpkg-dev file flit xz-utils $(sed -n 's/^\([a-z0-9][^ ]*\).*/\1/p' "$root/packages.txt" | tr '\n' ' ') >/dev/null
  cd /tessera && cmake --preset release -DTESSERA_BUILD_TESTS=OFF >/dev/null && cmake --build --preset release -j $(nproc) >/dev/null && cd build/release && cpack >/dev/null"
echo "built: $SECONDS s"
room use
cp "$at"/build/tessera/build/release/packages/tessera* "$at/use/root/"
start=$SECONDS
inside "$at/use" 'apt-get -q install -y --no-install-recommends /root/tessera_*.deb >/dev/null'
echo "installed: $((SECONDS - start)) s"
inside "$at/use" 'cd && tessera verify --ranks 2 --steps 3 --layers 1 && tessera lab start p1 my-p1 && tessera lab start 7 my-7 &&
  { tessera lab check 7 my-7 || [ $? = 1 ]; } && apt-get -q install -y --no-install-recommends python3-venv xz-utils >/dev/null &&
  mkdir unpacked && tar -xf tessera-*.tar.xz -C unpacked --strip-components 1 && unpacked/bin/tessera --version'
cp /etc/ssl/certs/ca-certificates.crt "$at/use/etc/ssl/certs/"  # for package indexes over https
[[ ! -f /etc/pip.conf ]] || cp /etc/pip.conf "$at/use/etc/"
inside "$at/use" "cd && python3 -m venv venv && venv/bin/pip install -q \$(ls /usr/share/tessera/*.whl) &&
  venv/bin/python -c 'import tessera; print(tessera.verify(tessera.Plan(dp=2), layers=1, steps=2).passed)'"
