"""Byte-level BPE of HF tokenizers on the same texts, the reference of tests/data/bpe_test.cpp.

Reads train.txt (training text), text.txt (valid UTF-8 to encode), ours/vocab.json and ours/merges.txt, and
broken.ids (int32 tokens that decode to invalid UTF-8). Writes theirs/vocab.json and theirs/merges.txt (trained by HF),
theirs.ids and ours.ids (text.txt encoded with either) and broken.txt (HF's decoding of broken.ids).
Arguments: vocabulary size, minimum count of a pair.
"""

import os
import sys

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def byte_level(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read(name):
    with open(name, encoding="utf-8", newline="") as file:
        return file.read()


def write_ids(tokenizer, text, name):
    numpy.array(tokenizer.encode(text).ids, dtype=numpy.int32).tofile(name)


vocab_size, min_count = int(sys.argv[1]), int(sys.argv[2])
theirs = byte_level(models.BPE())
trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=min_count, show_progress=False,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
theirs.train_from_iterator([read("train.txt")], trainer)
os.mkdir("theirs")
theirs.model.save("theirs")

text = read("text.txt")
write_ids(theirs, text, "theirs.ids")
ours = byte_level(models.BPE.from_file("ours/vocab.json", "ours/merges.txt"))
write_ids(ours, text, "ours.ids")
with open("broken.txt", "w", encoding="utf-8", newline="") as file:
    file.write(ours.decode(numpy.fromfile("broken.ids", dtype=numpy.int32).tolist(), skip_special_tokens=False))
