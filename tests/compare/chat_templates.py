"""Reference output of Jinja for tests/data/jinja_test.cpp, from python3-jinja2 with the environment of transformers.

chat_templates.py DIRECTORY COUNT SEED: writes cases.jsonl to the current directory, one case per line: template,
variables, and text, or null if Jinja raises or prints an object without text (an iterator, a function). Templates are those
in DIRECTORY, each with several conversations, and COUNT random ones from a grammar of the language.
"""
import datetime
import glob
import json
import os
import random
import re
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The generation block around assistant text: creates a scope and prints its body."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
NO_TEXT = re.compile(r"<(generator|built-in|bound|Macro|Namespace|LoopContext|function|class|jinja2|list_reverseiterator"
                     r"|reversed|range_iterator|dict_\w*reverse\w*)|\bdict_(items|keys|values)\(|\brange\(\d| object at 0x")

SYSTEM = {"role": "system", "content": "Be brief.\n Always. "}
CONVERSATION = [{"role": "user", "content": " How many moons has Mars? "}, {"role": "assistant", "content": "Two.\n"},
        {"role": "user", "content": "Their names: \"é\" <&'>?"}, {"role": "assistant", "content": "Phobos & Deimos 🌑"}]
THOUGHT = [CONVERSATION[0], {"role": "assistant", "content": "<think>\nMars... \n</think>\n\nTwo moons."}, CONVERSATION[2],
           {"role": "assistant", "content": "Deimos", "reasoning_content": "I know it."}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2.5, None, True]}}}
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Says the weather.", "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string", "description": "A \"town\""}, "days": {"type": "array", "items": {"type": "integer"}}}}}}]
CALLED = [CONVERSATION[0], {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "sun"},
          {"role": "tool", "content": "rain", "name": "weather"}, CONVERSATION[3]]
DOCUMENTS = [{"title": "Mars", "text": "A planet."}, {"title": "Moon", "text": "A\nstone."}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}]}, CONVERSATION[1]]


def conversations():
    """Conversations for templates of models."""
    for messages in (CONVERSATION[:1], CONVERSATION, CONVERSATION[:3], [SYSTEM] + CONVERSATION, [SYSTEM], THOUGHT, [SYSTEM] + THOUGHT[:3], CALLED, CALLED[:4],
                     CONVERSATION[1:], [CONVERSATION[0], CONVERSATION[0]], PARTS, []):
        for extra in ({}, {"tools": TOOLS}, {"documents": DOCUMENTS, "enable_thinking": False}):
            for prompt in (False, True):
                yield {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt,
                       "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", **extra}


VARIABLES = {"messages": [SYSTEM] + CONVERSATION, "tools": TOOLS, "documents": None, "add_generation_prompt": True, "bos_token": "<s>",
             "xs": [3, 1, 2, 1], "names": ["Ada", "bob", " Çelik ", "ada"], "d": {"b": 1, "a": [1, 2], "C": "x y"}, "e": {},
             "n": 7, "z": 0, "neg": -3, "f": 2.5, "s": "Hello, World", "t": "  pad\ted\n two\n", "u": "ünï ßtraße 🌑",
             "yes": True, "no": False, "nothing": None, "empty": "",
             "rows": [{"k": "x", "v": 2, "on": True}, {"k": "Y", "v": 1, "on": False}, {"k": "x", "v": 3}]}


class Draw:
    """Random templates from a grammar, mostly with valid types, so that most templates produce text."""

    def __init__(self, seed):
        self.r = random.Random(seed)
        self.locals = []
        self.captured = 0  # depth of enclosing blocks with captured text
        self.macros = []

    def one(self, *choices):
        return self.r.choice(choices)

    def chance(self, p):
        return self.r.random() < p

    # Expressions by intended type.

    def expr(self, depth, kind=None):
        kinds = {"str": self.text, "int": self.integer, "bool": self.boolean, "list": self.list, "dict": self.mapping}
        if self.chance(0.03):
            kind = None
        if kind is None:
            kind = self.one("str", "str", "int", "bool", "list", "dict", "other")
        if kind == "other":
            return self.one("f", "nothing", "missing", "2.0", "0.1", "f * 3", "n / 2", "none", "missing.x", "(1, 'a')",
                            "(xs,)", "()", "loop.index", "ns.a", "n / z", "xs[9]", "d.q")
        if self.locals and self.chance(0.15):
            return self.one(*self.locals)
        out = kinds[kind](depth - 1)
        if self.chance(0.07):
            out = f"{self.paren(out)} if {self.expr(depth - 1, 'bool')} else {self.expr(depth - 1, kind)}"
            return f"({out})"
        return f"({out})" if self.chance(0.1) else out

    def paren(self, text):
        return text if re.fullmatch(r"\w+", text) else f"({text})"

    def parts(self, depth):
        """Generators of an expression of a kind, plain and in parentheses."""
        return lambda kind=None: self.expr(depth, kind), lambda kind=None: self.paren(self.expr(depth, kind))

    def text(self, depth):
        plain = self.one("s", "t", "u", "empty", "bos_token", "'a'", '"b\\n"', "'it''s'", "'\\u00e9\\x41\\t'", "messages[0].role",
                         "messages[1]['content']", "d.C", "d['C']", "names[0]", "names[-1]", "'a\\\\b'", '"q\\"q"', "'x' 'y'")
        if depth <= 0:
            return plain
        e, p = self.parts(depth)
        return self.one(
            lambda: f"{e('str')} + {p('str')}", lambda: f"{p()} ~ {p()}", lambda: f"{p('str')} * {self.one('2', '0', '-1', 'n')}",
            lambda: f"{p('str')}|{self.one('upper', 'lower', 'trim', 'title', 'capitalize', 'string', 'reverse', 'first', 'last')}",
            lambda: f"{p('str')}.{self.one('upper', 'lower', 'strip', 'title', 'capitalize', 'lstrip', 'rstrip')}()",
            lambda: f"{p('str')}.{self.one('strip', 'lstrip', 'rstrip')}({e('str')})",
            lambda: f"{p('str')}|replace({e('str')}, {e('str')}{self.one('', ', 1', ', count=2')})",
            lambda: f"{p('str')}.replace({e('str')}, {e('str')})", lambda: f"{p('str')}[{e('int')}]",
            lambda: f"{p('str')}[{self.bound()}:{self.bound()}{self.one('', ':', ':-1', ':2')}]",
            lambda: f"{p('list')}|join({self.one('', repr(', '), 's', 'd=' + repr('-'))})", lambda: f"{p()}|tojson",
            lambda: f"{p(self.one('list', 'dict'))}|tojson(indent={self.one('2', '4', '0', 'none')})",
            lambda: f"{p('dict')}|tojson({self.one('sort_keys=true', 'ensure_ascii=true', 'true', 'separators=(%r, %r)' % (',', ':'))})",
            lambda: f"{p('str')}|indent({self.one('', '2', '2, true', 'first=true', 'width=3, blank=true', repr('> '))})",
            lambda: f"{e('str')}|default({e('str')}{self.one('', ', true', ', boolean=true')})", lambda: f"missing|default({e('str')})",
            lambda: f"{p('str')}|trim({e('str')})", lambda: f"{e('str')} or {e('str')}", lambda: f"{e('list')}|first",
            lambda: f"{p('list')}|map('string')|join", lambda: f"{p('str')}.split({self.one('', repr(' '), repr('l'))})[{self.bound() or 0}]",
            lambda: f"{self.one(*self.macros)}({e('str')})" if self.macros else plain, lambda: f"{p('list')}|string")()

    def bound(self):
        return self.one("", "", "0", "1", "2", "-1", "-2", "5", "-9")

    def integer(self, depth):
        plain = self.one("n", "z", "neg", "1", "2", "10", "0", "xs[0]", "d.b", "rows[1].v", "true", "007"[2:], "-4")
        if depth <= 0:
            return plain
        e, p = self.parts(depth)
        return self.one(
            lambda: f"{p('int')} {self.one('+', '-', '*', '//', '%')} {p('int')}", lambda: f"{p(self.one('list', 'str', 'dict'))}|length",
            lambda: f"{p('list')}|count", lambda: f"-{p('int')}", lambda: f"{p('int')}|int",
            lambda: f"{p('int')} / {p('int')}", lambda: f"{p('list')}|first", lambda: f"{p('list')}|last", lambda: f"{e('list')}[{self.bound() or 1}]",
            lambda: f"{p('int')} % {p('int')} + {p('int')} * 2", lambda: f"+{p('int')}")()

    def boolean(self, depth):
        plain = self.one("yes", "no", "true", "False", "loop.first", "tools", "missing", "add_generation_prompt", "nothing")
        if depth <= 0:
            return plain
        e, p = self.parts(depth)
        test = self.one("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "boolean",
                        "true", "false", "float", "not defined", "not none", "not string")
        return self.one(
            lambda: f"not {p('bool')}", lambda: f"{e('bool')} and {e('bool')}", lambda: f"{e('bool')} or {e('bool')}",
            lambda: f"{p()} is {test}", lambda: f"{p('int')} {self.one('<', '<=', '>', '>=', '==', '!=')} {p('int')}",
            lambda: f"{p('str')} {self.one('<', '==', '!=', '>=')} {p('str')}", lambda: f"{p()} {self.one('==', '!=')} {p()}",
            lambda: f"{p('str')} {self.one('in', 'not in')} {p('str')}", lambda: f"{p()} {self.one('in', 'not in')} {p('list')}",
            lambda: f"{p('str')} in {p('dict')}", lambda: f"{p('int')} is {self.one('odd', 'even', 'odd')}",
            lambda: f"{p('int')} is {self.one('eq', 'equalto', 'ne', 'lt', 'gt', 'le', 'ge')}({p('int')})",
            lambda: f"{p('str')} is in {p('list')}", lambda: f"{p('str')}.{self.one('startswith', 'endswith')}({e('str')})",
            lambda: f"{p('str')}.startswith('a' ~ {e('str')})",
            lambda: f"{p('list')} {self.one('!=', '==')} {p('list')}", lambda: f"missing is {test}", lambda: f"d.q is {test}")()

    def list(self, depth):
        plain = self.one("xs", "names", "rows", "messages", "[]", "[1, 2, 3]", "['a', none, 2.5]", "d.a", "tools", "(1, 2)", "[[1], [2, 3]]")
        if depth <= 0:
            return plain
        e, p = self.parts(depth)
        attribute = self.one("k", "v", "on", "role", "content", "q")
        return self.one(
            lambda: f"[{e()}, {e()}]", lambda: f"{p('list')} + {p('list')}", lambda: f"{p('list')}[{self.bound()}:{self.bound()}{self.one('', ':-1', ':2')}]",
            lambda: f"range({self.one('3', '1, 4', '5, 0, -2', 'n')})|list", lambda: f"{p('list')}|reverse|list", lambda: f"{p('dict')}.items()|list",
            lambda: f"{p('list')}|sort", lambda: f"rows|sort(attribute='{attribute}')",
            lambda: f"{p('list')}|map('{self.one('upper', 'string', 'length', 'trim', 'tojson')}')|list",
            lambda: f"{self.one('rows', 'messages')}|map(attribute='{attribute}'{self.one('', ', default=0')})|list",
            lambda: f"{self.one('rows', 'messages')}|{self.one('selectattr', 'rejectattr')}('{attribute}'{self.one('', ', %r, %r' % ('equalto', 'user'), ', %r, 1' % 'gt', ', %r' % 'defined')})|list",
            lambda: f"{p('list')}|{self.one('select', 'reject')}({self.one('', repr('string'), repr('odd'), '%r, 1' % 'gt', repr('none'))})|list",
            lambda: f"{p('str')}.split({self.one('', repr(' '), repr(', '), repr('l') + ', 1', 'none, 1')})", lambda: f"{p('str')}|list",
            lambda: f"{p('dict')}|dictsort",
            lambda: f"{p('dict')}|list", lambda: f"{p('dict')}|items|list", lambda: f"{p('dict')}.{self.one('keys', 'values')}()|list",
            lambda: f"{p('str')}.splitlines()",
            lambda: f"{p('list')}|list", lambda: f"{p('list')}|map('upper')")()

    def mapping(self, depth):
        plain = self.one("d", "e", "messages[0]", "rows[0]", "{}", "{'a': 1}", "tools[0]", "tools[0].function")
        if depth <= 0:
            return plain
        e = lambda kind=None: self.expr(depth, kind)
        return self.one(lambda: f"{{'k': {e()}, {e('str')}: {e()}}}", lambda: f"dict(a={e()})", lambda: f"{self.paren(e('list'))}|first",
                        lambda: f"{{'1': {e()}, 'x': {e()},}}", lambda: f"d.get({e('str')}, {e('dict')})", lambda: f"rows[{self.bound() or 0}]")()

    # Statements.

    def data(self):
        return self.one("a", "b\n", "\n", " ", "  \n  ", "x y ", "<|im_start|>", "\n\n", "\t", "é", "{ ", "} ", "#", "%", "'")

    def tag(self, inner):
        return f"{{%{self.one('', '', '', '-', '-', '+')}{self.one(' ', '', ' ')}{inner} {self.one('', '', '-', '+')}%}}"

    def body(self, depth):
        return "".join(self.statement(depth) for _ in range(self.r.randint(1, 4)))

    def block(self, head, depth, end):
        """A block with captured text."""
        self.captured += 1
        out = self.tag(head) + self.body(depth)
        self.captured -= 1
        return out + self.tag(end)

    def statement(self, depth):
        kind = self.r.random()
        if depth <= 0 or kind < 0.22:
            return self.data()
        if kind < 0.55:
            return f"{{{{{self.one('', '-', ' ')} {self.expr(self.r.randint(0, 3))} {self.one('', '-')}}}}}"
        inner = depth - 1
        known = list(self.locals), list(self.macros)
        out = self.one(self.branch, self.branch, self.loop, self.loop, self.assignment, self.assignment, self.rare)(inner)
        self.macros = known[1] if depth < 3 else self.macros
        return out

    def branch(self, depth):
        out = self.tag(f"if {self.expr(2, 'bool')}") + self.body(depth)
        if self.chance(0.3):
            out += self.tag(f"elif {self.expr(2, 'bool')}") + self.body(depth)
        if self.chance(0.4):
            out += self.tag("else") + self.body(depth)
        return out + self.tag("endif")

    def loop(self, depth):
        before = list(self.locals)
        head = self.one("x", "x", "y", "m")
        over, names = self.expr(2, "list"), [head]
        if self.chance(0.2):
            head, over, names = "k, w", self.one("d.items()", "rows[0].items()", "d|dictsort", "e.items()", "d|items", "[(1, 2), [3, 4]]"), ["k", "w"]
        test = f" if {head} {self.one('is defined', '!= 1', 'is string', '')}" if self.chance(0.15) and len(names) == 1 else ""
        self.locals += names + ["loop.index", "loop.last", "loop.index0"]
        out = self.tag(f"for {head} in {over}{test}") + self.body(depth)
        if self.chance(0.3):
            out += "{{ loop." + self.one("index", "index0", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem") + " }}"
        if self.chance(0.15):
            out += self.tag(f"if {self.expr(1, 'bool')}") + self.tag(self.one("break", "continue")) + self.tag("endif") + self.data()
        self.locals = before
        if self.chance(0.2):
            out += self.tag("else") + self.body(depth)
        return out + self.tag("endfor")

    def assignment(self, depth):
        name = self.one("a", "b", "c", "x", "s", "n", "messages")
        kind = self.r.random()
        if kind < 0.15:
            out = self.block(f"set {name}", depth, "endset")
        elif kind < 0.35:
            return self.tag(f"set ns = namespace(a={self.expr(1)}, b=0)") + self.tag(f"for x in {self.expr(1, 'list')}") + \
                self.tag(f"set ns.{self.one('a', 'b', 'c')} = {self.one('x', 'ns.b + 1', self.expr(1))}") + self.tag("endfor") + "{{ ns.a }}{{ ns.b }}"
        elif kind < 0.45:
            out = self.tag(f"set {name}, q = ({self.expr(2)}, {self.expr(1)})")
        else:
            out = self.tag(f"set {name} = {self.expr(2)}")
        if name in "abc":
            self.locals.append(name)
        return out

    def rare(self, depth):
        kind = self.r.randint(0, 5)
        if kind == 0:
            name = self.one("m1", "m2")
            before = list(self.locals)
            self.locals += ["p"]
            out = self.block(f"macro {name}(p, o={self.expr(1)})", depth, "endmacro")
            self.locals = before
            self.macros.append(name)
            return out + f"{{{{ {name}({self.expr(1)}{self.one('', ', 1', ', o=2', ', q=1')}) }}}}"
        if kind == 1:
            return "{#" + self.one("", "-", " ") + " a {{ comment }}\n " + self.one("", "-") + "#}" + self.data()
        if kind == 2 and not self.captured:
            return self.block("generation", depth, "endgeneration")
        if kind in (2, 3):
            return self.tag(f"if {self.expr(1, 'bool')}") + "{{ raise_exception('no: ' ~ s) }}" + self.tag("endif")
        return self.one("{{ xs.append(1) }}", "{{ d.pop('a') }}", "{{ strftime_now('%Y') }}", "{{ 'a' 'b' }}", "{{ [1,2,] }}",
                        "{{ missing() }}", "{{ s() }}", "{% bogus %}", "{{ 1 + }}", "{% if %}{% endif %}",
                        "{{ loop }}", "{{ {'a': {'b': 1}}.a.b }}", "{{ (1, 2)[0] }}", "{{ 1.5.x }}", "{{ -xs[0]|int }}")


def main():
    directory, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open("cases.jsonl", "w", encoding="utf-8", newline="\n") as file:
        def case(template, variables, compiled=None):
            try:
                text, error = (compiled or ENVIRONMENT.from_string(template)).render(**variables), ""
                if NO_TEXT.search(text):
                    text = None
            except Exception as e:  # any error of Jinja or Python
                text, error = None, f"{type(e).__name__}: {e}"
            if re.search(r"\d{19}", text or ""):
                return  # possibly an integer beyond 64 bits, only in Python
            file.write(json.dumps({"template": template, "variables": variables, "text": text, "error": error}, ensure_ascii=False) + "\n")

        for name in sorted(glob.glob(os.path.join(directory, "*.jinja"))):
            with open(name, encoding="utf-8", newline="") as template:
                source = template.read()
            compiled = ENVIRONMENT.from_string(source)
            for variables in conversations():
                case(source, variables, compiled)
        for i in range(count):
            # In blocks, Jinja treats a name as undefined before it is set, unless it was read outside of them.
            case("{% if s and n and messages %}{% endif %}" + Draw(seed * 1_000_000 + i).body(3), VARIABLES)


main()
