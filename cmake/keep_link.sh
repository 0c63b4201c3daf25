#!/bin/sh
# keep_link.sh FILE COMMAND...: runs a link command and, on success, writes its arguments to FILE, one per line.
set -e
file=$1
shift
"$@"
printf '%s\n' "$@" >"$file"
