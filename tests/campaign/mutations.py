"""Mutations of C++ text, based on tokens and brackets; the compiler rejects invalid ones."""
import re

HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
                    r"|^[ \t]*#(?:\\\n|[^\n])*|^(?:static_assert|using|namespace|template)\b[^\n]*", re.S | re.M)
MESSAGE = re.compile(r"\bthrow\b|\b(?:refuse|fail|say|warn|die|describe|message|fmt::\w+)\(")
PAIRS = [(" + ", " - "), (" * ", " / "), (" < ", " <= "), (" > ", " >= "), (" == ", " != "), (" && ", " || "),
         (" += ", " -= "), ("std::min", "std::max"), ("true", "false"), (" % ", " / "), (" <= ", " < "), (" >= ", " > "),
         ("++", "")]
CALL = re.compile(r"(?:(?<=\n)[ ]+|(?<=\) )|(?<=else ))((?:[\w:.\[\]*]|->)+(?:<[\w:]+>)?\(|[\w.\[\]:>*-]+ [-+*/|&]?= |throw )")
NAMED_CALL = re.compile(r"[\w>]\(")
NUMBER = re.compile(r"(?<![\w.])(\d+)(\.\d*)?(?:e-?\d+)?(?![\w.'])")


def closing(text, opening):
    """Position of the bracket that closes the one at `opening`, or -1."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def end_of_statement(text, begin):
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth < 0:
            return -1
        if depth == 0 and text[i] == ";":
            return i
    return -1


def blank(text):
    return re.sub(r"[^\n]", " ", text)


def mask_noncode(text):
    """The text with comments, strings, preprocessor lines and messages replaced by spaces of the same length."""
    code = HIDDEN.sub(lambda m: blank(m.group()), text)
    for m in list(MESSAGE.finditer(code)):
        if code[m.start()] == " ":  # nested in another match
            continue
        end = end_of_statement(code, m.end()) if m.group() == "throw" else closing(code, m.end() - 1)
        if end > 0:
            code = code[:m.end()] + blank(code[m.end():end]) + code[end:]
    return code


def arguments(code, opening):
    """Positions of the arguments of the call that opens at a bracket."""
    end, depth, begin, places = closing(code, opening), 0, opening + 1, []
    for i in range(opening + 1, max(end, 0) + 1):
        if depth == 0 and (code[i] == "," or i == end):
            places.append((begin, i))
            begin = i + 1
        depth += (code[i] in "([{") - (code[i] in ")]}")
    return [(b + len(code[b:e]) - len(code[b:e].lstrip()), e) for b, e in places if code[b:e].strip()]


def mutations(text, code, begin, end):
    """All mutations that begin between two places: {kind: [(begin, end, replacement)]}."""
    found = {}

    def add(kind, at, to, instead):
        if begin <= at < end and text[at:to] != instead:
            found.setdefault(kind, []).append((at, to, instead))

    line = code[begin:end]
    for one, other in PAIRS:
        for old, new in ((one, other), (other, one)):
            if not old:
                continue
            for m in re.finditer(re.escape(old) if not old.isalpha() else rf"\b{old}\b", line):
                add("operator", begin + m.start(), begin + m.end(), new)
    for m in NUMBER.finditer(line):
        value, at, to = m.group(), begin + m.start(), begin + m.end()
        changes = ["1" if value == "0" else "0", f"({value} + 1)", f"({value} - 1)", f"({value} * 2)"]
        for changed in changes:
            add("constant", at, to, changed)
    for m in re.finditer(r"\b(if|while|if constexpr) \(", line):
        opening = begin + m.end() - 1
        close = closing(code, opening)
        first = max(code.rfind(";", opening, close), opening) + 1
        add("condition", begin + m.start(), close, text[begin + m.start():first] + " !(" + text[first:close] + ")")
    for m in CALL.finditer(code, max(begin - 1, 0), end):
        at, stop = m.start(1), end_of_statement(code, m.start(1))
        before = code[:at].rstrip()[-1:]
        if stop > 0 and before and (before in ";{})" or code[:at].rstrip().endswith("else")):
            add("statement removed", at, stop, "")
            for jump in ("return", "break", "continue"):
                add("early exit", at, stop, jump)
    for m in re.finditer(r"\b(break|continue);", line):
        add("jump", begin + m.start(1), begin + m.end(1), "continue" if m.group(1) == "break" else "break")
        add("jump", begin + m.start(1), begin + m.end(1), "")
    for m in NAMED_CALL.finditer(line):
        places = arguments(code, begin + m.end() - 1)
        for (b1, e1), (b2, e2) in zip(places, places[1:]):
            if not re.search(r"\w[&*>]* [&*]*\w", code[b1:e2]):  # parameters of a declaration have types
                add("arguments swapped", b1, e2, text[b2:e2] + text[e1:b2] + text[b1:e1])
    return found
