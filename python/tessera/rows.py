"""Converts the rows of a table to JSON, one per line, for `tessera train --data`.

    python3 -m tessera.rows train.parquet > rows.jsonl

Reads CSV, TSV, YAML (PyYAML), Parquet and Arrow (pyarrow: pip install 'tessera[rows]'), by file extension; several
files are concatenated. Every value of CSV and TSV is a string.
"""
from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind in (".csv", ".tsv"):
        csv.field_size_limit(1 << 26)
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, delimiter="\t" if kind == ".tsv" else ",", strict=True)
    elif kind in (".yaml", ".yml"):
        import yaml

        yield from yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    elif kind == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    elif kind == ".arrow":
        import pyarrow

        with pyarrow.memory_map(str(path)) as file:
            try:
                table = pyarrow.ipc.open_file(file).read_all()
            except pyarrow.ArrowInvalid:  # a stream, as save_to_disk() of `datasets` writes it
                file.seek(0)
                table = pyarrow.ipc.open_stream(file).read_all()
            for batch in table.to_batches(1024):
                yield from batch.to_pylist()
    else:
        raise ValueError("expected a name that ends in .csv, .tsv, .yaml, .yml, .parquet or .arrow")


def main(paths: list[str]) -> int:
    """Prints the rows of all files; an error is reported as one line."""
    if not paths or paths[0].startswith("-"):
        print("usage: python3 -m tessera.rows FILE... > rows.jsonl", file=sys.stderr)
        return 2
    try:
        for path in paths:
            for row in rows(path):
                sys.stdout.buffer.write((json.dumps(row, ensure_ascii=False, default=str) + "\n").encode())
    except ImportError as error:
        print(f"{path}: the package {error.name} is missing: pip install 'tessera[rows]'", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"tessera.rows: {path}: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
