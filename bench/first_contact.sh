#!/usr/bin/env bash
# Everything that needs a GPU, in one call and one report: first_contact.sh all|A|B|C|PART[,PART...] [OUT [FILE...]] [OPTIONS].
# --help tells all. TESSERA_PYTHON names the interpreter that has torch (default python3).
exec "${TESSERA_PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu.py" "$@"
