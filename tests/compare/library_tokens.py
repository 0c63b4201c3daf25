"""Runs a tokenizer.json with the library `tokenizers`, the reference of tests/data/bpe_test.cpp.

Reads tokenizer.json and text.txt. Writes ids (int32) and decoded.txt.
"""

import numpy
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
with open("text.txt", encoding="utf-8", newline="") as file:
    ids = tokenizer.encode(file.read()).ids
numpy.array(ids, dtype=numpy.int32).tofile("ids")
with open("decoded.txt", "w", encoding="utf-8", newline="") as file:
    file.write(tokenizer.decode(ids, skip_special_tokens=False))
