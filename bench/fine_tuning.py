#!/usr/bin/env python3
"""Compares a fine-tuning step with PEFT, and evaluation, prefill and decoding with transformers, with the same weights.

usage: bench/fine_tuning.py [--binary build/release/bin/tessera] [--dtype fp32|bf16] [--rounds 5] [--threads N]
       [--only lora,evaluate,prefill,decode]

The model has the sizes of SmolLM-135M and random weights. Each round runs Tessera and then the library in
separate processes; a table row is the median over rounds. Both process one prompt as warm-up. The library uses its fused
attention ("sdpa") and, for LoRA, the fused AdamW. Decoding is also compared with the copy bandwidth of the same round:
bytes of all weights (read once per token) relative to the bytes copied by two threads in that time.

Needs: pip install torch transformers peft numpy
"""
import argparse
import json
import os
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BATCH, CONTEXT, WINDOWS, PROMPT, PROMPTS, WRITTEN = 4, 256, 32, 512, 3, 64
LORA = ["--lora-rank", "8", "--lora-targets", "q_proj,v_proj"]
STEPS, WARMUP = 12, 5


def make_model(directory, dtype):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32).save_pretrained(directory)


def peer(what, directory, dtype, threads):
    """Tokens/s of the library; GB/s for `copy`."""
    import torch

    from pytorch_peer import median_time

    torch.set_num_threads(threads)
    if what == "copy":
        source, target = torch.ones(1 << 28), torch.zeros(1 << 28)
        return (1 << 30) / min(median_time(lambda: target.copy_(source), 1, 1) for _ in range(5)) / 1e9
    from transformers import AutoModelForCausalLM

    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=wanted, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(1)

    def ids(rows, tokens):
        return torch.randint(0, 256, (rows, tokens), generator=generator)

    def loss():
        tokens = ids(BATCH, CONTEXT + 1)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    if what == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"])).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

        def step():
            found = loss()
            optimizer.zero_grad(set_to_none=True)
            found.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()

        return BATCH * CONTEXT / median_time(step, STEPS - WARMUP, 2)
    with torch.no_grad():
        if what == "evaluate":
            return WINDOWS * CONTEXT / median_time(lambda: [loss() for _ in range(WINDOWS // BATCH)], 1, 1)
        if what == "prefill":
            tokens = ids(1, PROMPT)
            return PROMPT / median_time(lambda: model(input_ids=tokens, use_cache=True, logits_to_keep=1), PROMPTS, 1)
        tokens = ids(1, 8)
        start = time.perf_counter()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=WRITTEN, do_sample=False,
                       eos_token_id=None, pad_token_id=0)
        return WRITTEN / (time.perf_counter() - start)


def parse_rate(said):
    """Parses tokens/s as printed by the program: 123, 12.3K, 1.20M."""
    number, unit = re.search(r"([0-9.]+)([KMB]?) tokens/s", said).groups()
    return float(number) * 1000 ** " KMB".index(unit or " ")


def ours(what, o, run, text):
    def tessera(*args):
        command = [o.binary, *map(str, args), "--threads-per-rank", str(o.threads)]
        return subprocess.run(command, check=True, capture_output=True, text=True)

    if what == "lora":
        with tempfile.TemporaryDirectory() as out:
            done = tessera("train", "--init", run, "--data", text, "--context", CONTEXT, "--batch", BATCH, "--steps", STEPS,
                           "--warmup", 1, "--lr", "1e-3", "--no-save", "--no-eval", "--ranks", 1, "--format", "json",
                           "--dtype", o.dtype, "--out", out, *LORA)
        return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]
    if what == "evaluate":
        seconds = []
        for name in (".short", ".long"):  # their difference excludes startup and the first windows
            start = time.perf_counter()
            tessera("evaluate", run, "--data", text + name, "--context", CONTEXT, "--batch", BATCH)
            seconds.append(time.perf_counter() - start)
        return WINDOWS * CONTEXT / (seconds[1] - seconds[0])
    letters = random.Random(2)
    count, length = (1 + PROMPTS, PROMPT) if what == "prefill" else (1, 8)
    with open(text + ".prompts", "w") as file:
        file.writelines("".join(letters.choices(string.ascii_letters, k=length)) + "\n" for _ in range(count))
    tokens = 1 if what == "prefill" else WRITTEN
    said = tessera("generate", run, "--prompts", text + ".prompts", "--tokens", tokens, "--temperature", 0).stderr.splitlines()[-1]
    rate = parse_rate(said)
    if what == "prefill":  # prompts are processed one by one, one new token each
        first = float(re.search(r"time to first token ([0-9.]+) s", said).group(1))
        return PROMPTS * PROMPT / ((1 + PROMPTS) / rate - first)
    return rate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build/release/bin/tessera"))
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="lora,evaluate,prefill,decode")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.peer:
        print(peer(o.peer[0], o.peer[1], o.dtype, o.threads))
        return
    with tempfile.TemporaryDirectory() as made:
        directory, run, text = (os.path.join(made, name) for name in ("folder", "run", "text.txt"))
        make_model(directory, o.dtype)
        bytes_of_weights = os.path.getsize(os.path.join(directory, "model.safetensors"))
        subprocess.run([o.binary, "checkpoint", "import", directory, "--tokenizer", "bytes", "--out", run], check=True,
                       stdout=subprocess.DEVNULL)
        letters = random.Random(1)
        for name, length in ((text, 200000), (text + ".short", WINDOWS // 2 * CONTEXT + 1),
                             (text + ".long", WINDOWS // 2 * 3 * CONTEXT + 1)):
            with open(name, "w") as file:
                file.write("".join(letters.choices(string.ascii_letters + " ", k=length)))

        def theirs(what):
            command = [sys.executable, os.path.abspath(__file__), "--dtype", o.dtype, "--threads", str(o.threads),
                       "--peer", what, directory]
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

        print(f"| {o.dtype} | Tessera, tokens/s | library, tokens/s | ratio | ratios of the rounds |\n|---|---|---|---|---|")
        for what in o.only.split(","):
            rows = [(ours(what, o, run, text), theirs(what), theirs("copy") if what == "decode" else 0) for _ in range(o.rounds)]
            mine, other, copy = (statistics.median(row[i] for row in rows) for i in (0, 1, 2))
            ratios = [row[0] / row[1] for row in rows]
            print(f"| {what} | {mine:.0f} | {other:.0f} | {statistics.median(ratios):.2f} | "
                  f"{', '.join(f'{r:.2f}' for r in ratios)} |", flush=True)
            if what == "decode":
                shares = [row[0] * bytes_of_weights / 1e9 / row[2] for row in rows]
                print(f"\ndecoding reads {mine * bytes_of_weights / 1e9:.1f} GB/s of weights; a copy moves {copy:.1f} GB/s: "
                      f"{statistics.median(shares):.2f} of it ({', '.join(f'{s:.2f}' for s in shares)})")


if __name__ == "__main__":
    main()
