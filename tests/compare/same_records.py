"""Compares files or output of two builds of the program: prints the first difference, or nothing.

usage: same_records.py folder|json|words|message OLD NEW [no-prose]
  folder  a file, or all files of a run, model folder or dataset: identical bytes. The new config.toml may have additional lines;
          metrics.jsonl is compared as json; event files, times and values derived from times are ignored.
  json    one object per line: equal except times: those of a plan may differ by 3%, those of a run are ignored; peak memory
          may be at most 1% larger in the new one.
  words   text: equal words, and numbers within 3%.
  message equal text
With no-prose, wording may differ: text and JSON strings with a space are compared by their numbers and option names, in any
order; comments of config.toml are not compared.
"""
import json
import os
import re
import sys

TIMES_OF_RUNS = {"step_ms", "tokens_per_s", "mfu", "peak_flops", "straggler", "gpu"}
TIMES_OF_PLANS = {"step_s", "step_s_range", "tokens_per_s", "mfu", "hfu", "tflops_per_rank", "parts", "bubble"}
PASSED_OVER = re.compile(r"lock|report\.json|trace\.json|events\.out\.tfevents.*")
OPTION = re.compile(r"--[a-z][a-z-]*")
no_prose = False
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def near(old, new, unit=1e-9):
    return abs(old - new) <= max(0.03 * abs(old), unit)


def wording(old, new):
    """Compares two texts that may be worded differently."""
    for pattern in (OPTION, NUMBER):
        a, b = (sorted(set(pattern.findall(text))) for text in (old, new))
        if a != b:
            return f"{sorted(set(a) ^ set(b))} only in one of {old!r} and {new!r}"
    return ""


def words(old, new):
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return f"{old!r} is now {new!r}"
    for a, b in zip(NUMBER.findall(old), NUMBER.findall(new)):
        decimals = len(a.partition(".")[2]) if "e" not in a else 9
        if not near(float(a), float(b), 1.01 * 10**-decimals if decimals else 0):
            return f"{a} is now {b} in {new!r}"
    return ""


def values(where, old, new, plan, timed=False, unit=0.0):
    """The first difference of two JSON values; `plan`: predictions, `timed`: inside times of a plan, with `unit` as
    absolute tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            return f"{where}: other keys: {sorted(old.keys() ^ new.keys())}"
        for key in old:
            name = f"{where}.{key}" if where else key
            if key == "peak_bytes" or (key == "measured" and where.endswith(".peak")):
                for a, b in zip(old[key], new[key]):
                    if b > 1.01 * a:
                        return f"{name}: {a} is now {b}"
            elif plan or key not in TIMES_OF_RUNS and name != "bubble.measured":
                unit = {"parts": 0.003 * old.get("step_s", 0), "bubble": 0.003}.get(name, unit)
                found = values(name, old[key], new[key], plan, timed or (plan and key in TIMES_OF_PLANS), unit)
                if found:
                    return found
        return ""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next(filter(None, (values(f"{where}[{i}]", a, b, plan, timed, unit)
                                  for i, (a, b) in enumerate(zip(old, new)))), "")
    if timed and isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return "" if near(old, new, unit) else f"{where}: {old} is now {new}"
    if no_prose and isinstance(old, str) and isinstance(new, str) and " " in old + new:
        found = wording(old, new)
        return f"{where}: {found}" if found else ""
    if plan and isinstance(old, str) and isinstance(new, str):
        found = words(old, new)
        return f"{where}: {found}" if found else ""
    return "" if old == new and type(old) is type(new) else f"{where}: {old!r} is now {new!r}"


def lines(compare, old, new):
    if len(old) != len(new):
        return f"{len(old)} lines are now {len(new)}"
    return next((f"line {i + 1}: {found}" for i, (a, b) in enumerate(zip(old, new)) if (found := compare(a, b))), "")


def records(old, new):
    a, b = (json.loads(text) if text.startswith("{") else text for text in (old, new))
    return values("", a, b, isinstance(a, dict) and ("step_s" in a or a.get("event") in ("plan", "recommendation")))


def manifest(text):
    value = json.loads(text)
    value["files"].pop("config.toml", None)  # may have additional lines
    return value


def one_file(name, old, new):
    if os.path.islink(old):
        return "" if os.readlink(old) == os.readlink(new) else "another link"
    with open(old, "rb") as a, open(new, "rb") as b:
        a, b = a.read(), b.read()
    if a == b:
        return ""
    if name == "config.toml":
        kept = b.decode().splitlines()
        lost = [line for line in a.decode().splitlines() if line not in kept and not (no_prose and line.startswith("#"))]
        return f"lost {lost[0]}" if lost else ""
    if name == "manifest.json":
        return values("", manifest(a), manifest(b), False)
    if name == "metrics.jsonl":
        return lines(records, a.decode().splitlines(), b.decode().splitlines())
    return f"{len(a)} bytes and {len(b)}, and not the same"


def files(folder):
    found = {}
    for place, inner, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in inner + names if not PASSED_OVER.fullmatch(name)):
            if os.path.islink(path) or not os.path.isdir(path):
                found[os.path.relpath(path, folder)] = path
    return found


def folders(old, new):
    if os.path.isfile(old) and os.path.isfile(new):
        return one_file("", old, new)
    a, b = files(old), files(new)
    if not a or a.keys() != b.keys():
        return f"other files: {sorted(a.keys() ^ b.keys())}" if a else "no files"
    return next((f"{path}: {found}" for path in a if (found := one_file(os.path.basename(path), a[path], b[path]))), "")


def main():
    global no_prose
    how, old, new, *no_prose = sys.argv[1:]
    if how == "folder":
        return folders(old, new)
    with open(old) as a, open(new) as b:
        if how == "message":
            a, b = a.read(), b.read()
            return wording(a, b) if no_prose else "" if a == b else f"{a!r} is now {b!r}"
        if how == "words" and no_prose:
            return wording(a.read(), b.read())
        return lines(records if how == "json" else words, a.read().splitlines(), b.read().splitlines())


if __name__ == "__main__":
    print(main()[:400], end="")
