#!/usr/bin/env python3
"""Checks that every source includes the C++ standard headers whose names it uses.

standard_headers.py [FILE...]   exit status 1 with one line per missing header; default: all sources
standard_headers.py --fix       inserts the missing headers

A .cpp or .cu file may rely on the header of its own name. A name of several headers counts as included with any of them.
Builds with precompiled headers compile without these includes; builds without them depend on the standard library.
"""
import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The text of a source without comments, strings and characters.
OTHER = re.compile(r'//[^\n]*|/\*.*?\*/|R"(?P<end>\w*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"' r"|(?<![0-9a-fA-F])'(?:\\[^'\n]*|[^'\\\n])'", re.S)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|"([^"\n]+)")', re.M)
NAMES = {
    "algorithm": """sort stable_sort nth_element partial_sort max min minmax max_element min_element minmax_element clamp find
        find_if find_if_not find_first_of any_of all_of none_of count count_if copy copy_n copy_if copy_backward fill fill_n
        generate transform remove remove_if replace reverse rotate unique partition stable_partition lower_bound upper_bound
        equal_range binary_search merge includes set_difference set_union set_intersection equal lexicographical_compare
        next_permutation for_each mismatch search shuffle is_sorted push_heap pop_heap make_heap""",
    "array": "array to_array",
    "atomic": """atomic atomic_ref atomic_flag atomic_thread_fence memory_order_relaxed memory_order_acquire
        memory_order_release memory_order_acq_rel memory_order_seq_cst""",
    "barrier": "barrier",
    "bit": "bit_cast bit_ceil bit_floor bit_width countl_zero countr_zero popcount has_single_bit endian rotl rotr",
    "charconv": "from_chars to_chars",
    "chrono": "chrono",
    "cmath": """sqrt exp exp2 log log2 log10 log1p expm1 pow abs fabs tanh erf erfc sin cos floor ceil round lround llround
        trunc fmod isfinite isnan isinf hypot ldexp frexp nearbyint rint lrint copysign nextafter fma cbrt fmax fmin
        signbit""",
    "complex": "complex",
    "condition_variable": "condition_variable condition_variable_any cv_status",
    "csignal": "raise sig_atomic_t",
    "cstdint": "",
    "cstdio": "FILE fopen fclose fread fwrite fflush fputs fputc fprintf printf snprintf fgets fseek ftell rename perror",
    "cstdlib": "getenv abort exit _Exit strtol strtod strtoll strtoull malloc free atoi system",
    "cstring": "memcpy memset memmove memcmp strlen strcmp strncmp strerror strchr strstr strsignal",
    "deque": "deque",
    "exception": "exception_ptr current_exception rethrow_exception make_exception_ptr uncaught_exceptions terminate",
    "filesystem": "filesystem",
    "fstream": "ifstream ofstream fstream",
    "functional": "function plus minus multiplies less greater equal_to hash invoke bind_front reference_wrapper ref cref",
    "future": "future async promise shared_future packaged_task launch future_status",
    "initializer_list": "initializer_list",
    "iostream": "cout cerr cin clog",
    "iterator": "back_inserter ssize next prev distance advance inserter istreambuf_iterator make_move_iterator",
    "limits": "numeric_limits",
    "list": "list",
    "map": "map multimap",
    "memory": """unique_ptr shared_ptr weak_ptr make_unique make_shared enable_shared_from_this addressof
        static_pointer_cast dynamic_pointer_cast default_delete""",
    "mutex": "mutex lock_guard unique_lock scoped_lock call_once once_flag recursive_mutex timed_mutex",
    "numbers": "numbers",
    "numeric": "accumulate iota reduce inner_product partial_sum gcd lcm midpoint exclusive_scan inclusive_scan",
    "optional": "optional nullopt nullopt_t make_optional",
    "queue": "queue priority_queue",
    "random": "mt19937 mt19937_64 random_device uniform_int_distribution normal_distribution",
    "regex": "regex smatch cmatch regex_match regex_search regex_replace sregex_iterator",
    "set": "set multiset",
    "shared_mutex": "shared_mutex shared_lock",
    "source_location": "source_location",
    "span": "span as_bytes as_writable_bytes",
    "sstream": "ostringstream istringstream stringstream",
    "stdexcept": "runtime_error logic_error invalid_argument out_of_range domain_error length_error",
    "stop_token": "stop_token stop_source",
    "string": "string to_string stoi stol stoll stoull stod getline char_traits",
    "string_view": "string_view",
    "system_error": "error_code system_error errc generic_category system_category",
    "thread": "thread jthread this_thread",
    "tuple": "tuple make_tuple tie forward_as_tuple apply tuple_size tuple_element",
    "type_traits": """is_same_v is_floating_point_v is_integral_v conditional_t remove_cvref_t decay_t enable_if_t
        is_trivially_copyable_v is_base_of_v invoke_result_t underlying_type_t make_unsigned_t true_type false_type
        is_constant_evaluated type_identity_t remove_reference_t is_enum_v is_unsigned_v is_signed_v is_invocable_v
        is_arithmetic_v is_convertible_v remove_const_t""",
    "typeindex": "type_index",
    "unordered_map": "unordered_map",
    "unordered_set": "unordered_set",
    "utility": "move forward swap exchange pair make_pair declval index_sequence make_index_sequence as_const in_place",
    "variant": "variant visit holds_alternative get_if monostate",
    "vector": "vector",
}
# Names that other headers define as well.
ALSO = {
    "move": {"algorithm"}, "swap": {"algorithm"}, "abs": {"cstdlib"}, "hash": {"string", "string_view"},
    "getline": {"iostream"}, "remove": {"cstdio"}, "rename": {"cstdio"}, "pair": {"map"}, "make_pair": {"map"},
    "get_if": {"variant"}, "search": {"functional"}, "exit": {"stdlib.h"}, "size": {"vector"},
    **{name: {"vector", "string", "array", "span", "map", "set", "string_view", "deque"}
       for name in ("ssize", "next", "prev", "distance", "advance")},
    **{name: {"string_view", "string"} for name in ("char_traits",)},
    "apply": {"tuple"},
}
RANGES = {name for name in NAMES["algorithm"].split()}
HEADERS = {}
for header, names in NAMES.items():
    for name in names.split():
        HEADERS.setdefault(name, set()).add(header)
for name, headers in ALSO.items():
    HEADERS.setdefault(name, set()).update(headers)
STD = re.compile(r"(?<![\w:])(?:std::)(ranges::|filesystem::|chrono::|numbers::|this_thread::)?(\w+)")
SIZED = re.compile(r"(?<![\w:])(?:std::)?u?int(?:8|16|32|64)_t\b")


def text_of_code(text):
    return OTHER.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def included(text):
    return {match[1] for match in INCLUDE.finditer(text) if match[1]}


def missing(path, text, own_header=""):
    """The headers that a source uses and neither it nor its own header includes; the first name that needs each."""
    code = text_of_code(text)
    have = included(text) | included(own_header)
    found = {}
    for match in STD.finditer(code):
        space, name = match[1] or "", match[2]
        if space == "ranges::":
            headers = {"algorithm"} if name in RANGES else set()
        elif space:
            headers = {{"filesystem::": "filesystem", "chrono::": "chrono", "numbers::": "numbers",
                        "this_thread::": "thread"}[space]}
        else:
            headers = HEADERS.get(name, set())
        if headers and not headers & have:
            first = next(header for header in NAMES if header in headers)
            found.setdefault(first, match[0])
    if (match := SIZED.search(code)) and not have & {"cstdint", "stdint.h", "inttypes.h", "cinttypes"}:
        found.setdefault("cstdint", match[0])
    return found


def insert(text, headers):
    """The text with additional includes of standard headers, next to the existing ones in alphabetical order."""
    lines = text.split("\n")
    standard = [i for i, line in enumerate(lines) if re.match(r"#include <[a-z_]+>", line)]
    quoted = [i for i, line in enumerate(lines) if line.startswith('#include "')]
    if standard:
        at, block = standard[0], headers
        lines[at:at] = [f"#include <{header}>" for header in block]
        end = at
        while re.match(r"#include <[a-z_]+>", lines[end]):
            end += 1
        lines[at:end] = sorted(set(lines[at:end]))
    elif quoted or "#pragma once" in lines:
        own = lines.index("#pragma once") if "#pragma once" in lines else quoted[0]
        more = [f"#include <{header}>" for header in sorted(headers)]
        is_own = "#pragma once" in lines
        follows = lines[own + 1] != "" if own + 1 < len(lines) else False
        lines[own + 1:own + 1] = ([] if is_own else [""]) + more + ([""] if follows or True else [])
    else:
        raise ValueError("no place for an include")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def sources():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], stdout=subprocess.PIPE, check=True, text=True).stdout
    return [path for path in listed.split("\n") if path.endswith((".h", ".cpp", ".cu", ".cuh"))
            and not path.startswith("tests/cuda_emulator/") and os.path.exists(os.path.join(ROOT, path))]


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--fix", action="store_true")
    options = parser.parse_args()
    failed = False
    for path in options.files or sources():
        full = os.path.join(ROOT, path)
        stem, kind = os.path.splitext(full)
        own = stem + ".h"
        text = read(full)
        found = missing(path, text, read(own) if kind in (".cpp", ".cu") and os.path.exists(own) else "")
        if found and options.fix:
            with open(full, "w", encoding="utf-8") as file:
                file.write(insert(text, found))
        for header, name in sorted(found.items()):
            failed = True
            print(f"{path}: uses {name} without <{header}>")
    sys.exit(1 if failed and not options.fix else 0)


if __name__ == "__main__":
    main()
