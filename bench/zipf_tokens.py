"""Tokens for measurements, as a BPE text has them roughly: over the whole vocabulary, the frequent ones with low numbers.

The probability of token r is as 1 / (r + 2.7) (Zipf's law with Mandelbrot's constant), drawn from a fixed seed, so that
all programs that are measured get the same. They are written as llm.c's token file, with the vocab.json and merges.txt
that such a file needs, in which every token beyond the 256 bytes is one by itself.
"""
import array
import itertools
import json
import os
import random
import sys

HEADER_BYTES = 1024  # of a token file: 256 int32, of which the first are magic, version and number of tokens
MAGIC, VERSION = 20240520, 1


def write_tokens(folder, vocab, count):
    """Writes folder/tokens.bin and, beside it, the tokenizer's files; returns the path of the tokens."""
    if not 256 <= vocab <= 65536:
        raise ValueError(f"expected a vocabulary of 256 to 65536, found {vocab}")
    cumulated = list(itertools.accumulate(1 / (r + 2.7) for r in range(vocab)))
    tokens = array.array("H", random.Random(1).choices(range(vocab), cum_weights=cumulated, k=count))
    header = array.array("i", [MAGIC, VERSION, count] + [0] * (HEADER_BYTES // 4 - 3))
    if sys.byteorder == "big":
        tokens.byteswap()
        header.byteswap()
    path = os.path.join(folder, "tokens.bin")
    with open(path, "wb") as f:
        f.write(header.tobytes() + tokens.tobytes())
    # GPT-2's spelling of bytes: what is visible in Latin-1 stands for itself, the others for U+0100 and on
    visible = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    spellings = [chr(b) for b in visible] + [chr(0x100 + i) for i in range(256 - len(visible))]
    spellings += [f"<{r}>" for r in range(256, vocab)]
    with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as f:
        json.dump({spelling: r for r, spelling in enumerate(spellings)}, f)
    with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as f:
        f.write("#version: 0.2\n")
    return path
