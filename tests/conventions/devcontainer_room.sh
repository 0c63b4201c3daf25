#!/usr/bin/env bash
# devcontainer_room.sh DIR: runs the steps of .devcontainer in a bare Debian 12, created by debootstrap in DIR: the RUN
# of the Containerfile's target, then postCreateCommand in a checkout of HEAD. Requires root.
set -euo pipefail
root=$(dirname "$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")")
room=$(realpath -m "${1:?devcontainer_room.sh DIR}")
described=$root/.devcontainer/devcontainer.json
field() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for name in sys.argv[2].split("."): value = value[name]
print(value)' "$described" "$1"; }
# The RUN command of a target in one line.
steps() { sed -n "/^FROM .* AS $1\$/,/^FROM .* AS /p" "$root/Containerfile" | sed -e ':a' -e '/\\$/{N;s/\\\n//;ba}' | sed -n 's/^RUN //p'; }

run=$(steps "$(field build.target)")
[[ -n $run ]] || { echo "the Containerfile has no RUN for that target" >&2; exit 1; }
[[ -e $room/.made ]] && exit
rm -rf --one-file-system "$room"
mkdir -p "$room"
if ! mount -t proc proc "$room" 2>/dev/null; then
  echo "this machine does not let us mount: the steps of .devcontainer are not run here"
  exit
fi
umount "$room"
debootstrap --variant=minbase bookworm "$room" http://deb.debian.org/debian >/dev/null
mount -t proc proc "$room/proc"
trap 'umount "$room/proc"' EXIT
inside() {
  chroot "$room" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive sh -ec "$1"
}
mkdir -p "$room/src" "$room/workspaces/tessera"
cp "$root/packages.txt" "$room/src/"
inside "$run" >"$room/packages.log" 2>&1 || { tail -n 20 "$room/packages.log"; exit 1; }
echo "packages: $SECONDS s"
cp /etc/ssl/certs/ca-certificates.crt "$room/etc/ssl/certs/"  # for package indexes over https
[[ ! -f /etc/pip.conf ]] || cp /etc/pip.conf "$room/etc/"
git -C "$root" archive HEAD | tar -x -C "$room/workspaces/tessera"
inside "cd /workspaces/tessera && TESSERA_NO_INSTALL=1 $(field postCreateCommand)"
echo "in all: $SECONDS s"
touch "$room/.made"
