#!/usr/bin/env bash
# GPU tests and measurements with one report: first_contact.sh all|A|B|C|PART[,PART...] [OUT [FILE...]] [OPTIONS]. See --help.
# TESSERA_PYTHON is the interpreter with torch (default python3).
exec "${TESSERA_PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu.py" "$@"
