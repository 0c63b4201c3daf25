#!/bin/sh
# keep_link.sh FILE COMMAND...: runs the command of a link, and keeps its words in FILE, one on each line, when it worked.
set -e
file=$1
shift
"$@"
printf '%s\n' "$@" >"$file"
