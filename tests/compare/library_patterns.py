"""Tokenizers with the patterns and steps of published models, trained and run by the library `tokenizers`, the reference of
tests/data/bpe_test.cpp.

Writes text.txt, names.txt, a directory per name with tokenizer.json, ids (int32; names of special tokens are plain text)
and decoded.txt, and milliseconds.txt with the time of the library for each.
"""

import json
import os
import random
import sys
import time
import unicodedata

import numpy
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

S, B = pre_tokenizers.Split, pre_tokenizers.ByteLevel
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*END|"
O200K = CASED.replace("END", CONTRACTIONS + "?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + REST
TEKKEN = CASED.replace("END", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + REST
# As in OpenAI's package, where `{1,3}+` and `$` have the same meaning as in Oniguruma.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^EOL\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[EOL]*|"""
    r"\s*[EOL]+|\s+(?!\S)|\s+"
).replace("EOL", "\r\n")
DEEPSEEK_V2 = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
# Features that differ from or are missing in other regex dialects.
ONIG = (r"(?<=\s+)\p{Uppercase_Letter}{1,2}+|(?i:strasse|ﬁ)|(?x: n a # ïve" + "\n"
        + r")|\G\p{^L}\X|[\p{L}&&[^\p{Han}]]+|\h{2}|\b\w|[\W_]+\b")


def split(pattern, behaviour="isolated", invert=False):
    return S(Regex(pattern), behaviour, invert)


def sequence(*steps, regex=False):
    return pre_tokenizers.Sequence([*steps, B(add_prefix_space=False, use_regex=regex)])


# (pre-tokenizer, normalizer) of each.
KINDS = {
    "gpt2": (B(add_prefix_space=False), None),
    "cl100k": (sequence(split(CL100K, "removed", True)), None),
    "llama3": (sequence(split(LLAMA3)), None),
    "qwen2": (sequence(split(LLAMA3.replace("{1,3}", ""))), normalizers.NFC()),
    "o200k": (sequence(split(O200K, "removed", True)), None),
    "tekken": (sequence(split(TEKKEN)), None),
    "deepseek3": (sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK)), None),
    "deepseek2": (sequence(*[split(each) for each in DEEPSEEK_V2], pre_tokenizers.Digits(True)), None),
    "starcoder": (sequence(pre_tokenizers.Digits(True), regex=True), None),
    "falcon": (sequence(pre_tokenizers.Punctuation("contiguous"), regex=True), None),
    "spaces": (sequence(S(" ", "merged_with_next"), pre_tokenizers.Digits(False)), normalizers.NFKC()),
    "words": (sequence(pre_tokenizers.Whitespace()), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "lower": (sequence(pre_tokenizers.WhitespaceSplit()), normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])),
    "onig": (sequence(split(ONIG, "merged_with_previous")), None),
}  # fmt: skip

BLOCKS = [(0x20, 0x7E), (0xA0, 0x24F), (0x250, 0x2FF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58A),
          (0x591, 0x5F4), (0x600, 0x6FF), (0x700, 0x74A), (0x900, 0x97F), (0x980, 0x9FB), (0xE01, 0xE5B), (0x10A0, 0x10FF),
          (0x1100, 0x11FF), (0x1200, 0x137C), (0x13A0, 0x13FD), (0x1E00, 0x1FFE), (0x2000, 0x206F), (0x2070, 0x218B),
          (0x2190, 0x23FF), (0x2460, 0x24FF), (0x3000, 0x30FF), (0x3131, 0x318E), (0x3200, 0x33FF), (0x4E00, 0x9FA5),
          (0xAC00, 0xD7A3), (0xF900, 0xFAD9), (0xFB00, 0xFB4F), (0xFE00, 0xFE6B), (0xFF01, 0xFFEE), (0x10400, 0x1044F),
          (0x1D400, 0x1D7FF), (0x1F300, 0x1F64F), (0x1F900, 0x1F9FF), (0x20000, 0x20100)]  # fmt: skip
# Unicode characters that differ in the library's older tables: square era Reiwa of 12.1, end of text mark of 14, and added
# marks.
NEWER = "\u32ff\u061d\u07fd\u09fe"
WORDS = (
    "the of and It's I'LL we've DON'T camelCase HTMLParser snake_case x1 1234567 3.14 http://a.b/c?d=e&f "
    "return for(i=0;i<10;++i) {} [] <|end|> <tool> Straße größer naïve e\u0301 ﬁne ½ ² Ⅳ 漢字 かな カナ 한국어 العربية "
    "भारत ไทย עברית русский ёлка Ελλάδα Ὀδυσσεύς İstanbul ſ ʼn 👩‍🔬 🏳️‍🌈 👍🏽 \u200b\ufeff\u00ad"
).split(" ")
SPACES = [" ", " ", " ", " ", " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\x85",
          "\x0b", "\x0c", "\x1c", "\u180e", " " * 20, "\n" * 7, "\r", "\r\n\r\n  "]  # fmt: skip


def random_text(length, seed):
    rng = random.Random(seed)
    parts, made = [], 0
    while made < length:
        kind = rng.random()
        if kind < 0.45:
            part = rng.choice(WORDS)
        elif kind < 0.55:
            part = "".join(rng.choice("0123456789٣१") for _ in range(rng.randint(1, 9)))
        elif kind < 0.6:
            part = "".join(rng.choice("!?.,;:-_/\\\"'()[]{}<>@#$%^&*+=~`|—…«»") for _ in range(rng.randint(1, 4)))
        elif kind < 0.62:
            part = "".join(chr(rng.randint(0, 0x1F)) for _ in range(2))
        else:
            first, last = rng.choice(BLOCKS)
            part = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
            part = "".join(c for c in part if unicodedata.category(c) != "Cn" and c not in NEWER)
        part += rng.choice(SPACES) if rng.random() < 0.8 else ""
        parts.append(part)
        made += len(part.encode())
    return "".join(parts)


def main(length):
    learn, text = random_text(60_000, 1), random_text(length, 2)
    with open("text.txt", "w", encoding="utf-8", newline="") as file:
        file.write(text)
    with open("names.txt", "w") as file, open("milliseconds.txt", "w") as times:
        for name, (pre_tokenizer, normalizer) in KINDS.items():
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
            if normalizer is not None:
                tokenizer.normalizer = normalizer
            trainer = trainers.BpeTrainer(vocab_size=900, min_frequency=2, show_progress=False, initial_alphabet=B.alphabet())
            tokenizer.train_from_iterator([learn], trainer)
            tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
            strips = name in ("gpt2", "o200k")
            tokenizer.add_tokens([AddedToken("<tool>", lstrip=strips, rstrip=name == "gpt2", normalized=False),
                                  AddedToken("the", single_word=True, normalized=name == "llama3"),
                                  AddedToken("snake_case", lstrip=True, normalized=True)])
            os.mkdir(name)
            said = json.loads(tokenizer.to_str())
            if name == "tekken":  # older merge format
                said["model"]["merges"] = [" ".join(merge) for merge in said["model"]["merges"]]
                said["model"].update(ignore_merges=True, continuing_subword_prefix="", end_of_word_suffix="", dropout=0.0)
                said["padding"] = dict(strategy="BatchLongest", direction="Right", pad_to_multiple_of=None, pad_id=0,
                                       pad_type_id=0, pad_token="!")  # fmt: skip
                said["truncation"] = dict(direction="Right", max_length=100_000_000, strategy="LongestFirst", stride=0)
            with open(f"{name}/tokenizer.json", "w", encoding="utf-8") as out:
                json.dump(said, out, ensure_ascii=name != "o200k")
            tokenizer = Tokenizer.from_file(f"{name}/tokenizer.json")
            tokenizer.encode_special_tokens = True
            begun = time.perf_counter()
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            print(name, round(1000 * (time.perf_counter() - begun)), file=times)
            numpy.array(ids, dtype=numpy.int32).tofile(f"{name}/ids")
            with open(f"{name}/decoded.txt", "w", encoding="utf-8", newline="") as out:
                out.write(tokenizer.decode(ids, skip_special_tokens=False))
            print(name, file=file)


main(int(sys.argv[1]))
