"""Random command lines of the program: arguments, environment, and files that they may refer to."""
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

TINY = {"layers": "1", "heads": "1", "channels": "8", "context": "8", "batch": "2", "steps": "2",
        "threads-per-rank": "1"}
SIZES = {"batch", "channels", "context", "ffn", "head-dim", "heads", "kv-heads", "layers", "microbatches", "vocab"}
NUMBERS = ["0", "1", "2", "3", "4", "6", "8", "0.5", "1e-3"]
WRONG = ["", "-1", "1.5", "abc", "0x10", " 1", "1 ", "+1", "1e", "--", "true", "é", "\udcff\udcfe", "%s%n", "`layers`",
         "'\"", "a b", "--steps"]
EXTREME = ["1025", "100000", "1000000000", "9223372036854775807", "9223372036854775808", "-9223372036854775808",
           "1e308", "1e-320", "1e400", "nan", "inf", "-nan", "0." + "0" * 40 + "1", "007"]
INPUTS = ["text.txt", "tokens", "run", "run/checkpoints/step-2", "traced", "empty.txt", "binary.bin", "missing",
          "missing/deep", "no-run", "broken-run", "torn-run", "loop", "tokenizer", "bad-tokenizer", "run/config.toml",
          "plan.txt", "."]
DEVICES = ["null", "full", "pipe", "link"]
OUTPUTS = ["new", "new/deep", "run", "text.txt", "text.txt/x", "tokens", "empty", "a b", "é", "x" * 300, "train"]
PATHS = {"data": INPUTS, "tokenizer": ["char", "bytes", "bpe", "tokenizer", "bad-tokenizer", "tokens", "text.txt",
         "missing"], "out": OUTPUTS, "hardware": ["h100", "a100-40", "laptop", "h101", "machine.toml", "bad.toml", "missing.toml", "."], "software": ["fsdp", "megatron",
         "tessera", "good.toml", "missing.toml"], "html": OUTPUTS, "cases": ["cases.jsonl", "text.txt", "binary.bin",
         "missing"], "schedule": ["1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "v-min", "interleaved", "plan.txt",
         "binary.bin", "missing", "."], "record": OUTPUTS, "replay": INPUTS, "hostfile": INPUTS,
         "launch": ["env", "nice -n 1", "false", "missing", "env {ranks}", "{ranks}"], "config": ["good.toml", "bad.toml",
         "drawn.toml", "drawn.toml", "binary.bin", "empty.txt", "missing", "."]}
SHELLS = {"": ["ulimit -n 20", "ulimit -n 6", "ulimit -s 1024", "ulimit -c 0", "umask 777", "umask 0"],
          "ulimit-f": ["ulimit -f 0", "ulimit -f 3"], "ulimit-v": ["ulimit -v 900000", "ulimit -v 400000"],
          "closed": ["exec <&-", "exec >&-", "exec 2>&-", "exec <&- >&-"], "stdout": ["exec >full", "exec > >(true)",
          "exec >null"]}
VARIABLES = [("HOME", None), ("LC_ALL", "xx_YY.odd"), ("LC_ALL", "tr_TR.UTF-8"), ("OMP_NUM_THREADS", "100000"),
             ("OMP_NUM_THREADS", "-1"), ("OMP_NUM_THREADS", "abc"), ("OMP_STACKSIZE", "1"), ("OMP_PROC_BIND", "odd"),
             ("TZ", "Nowhere/Odd"), ("TERM", None), ("PATH", None), ("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"),
             ("SLURM_NTASKS", "abc"), ("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("OMPI_COMM_WORLD_SIZE", "2"),
             ("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_LOCAL_RANK", "-3"), ("PMI_RANK", "1"), ("PMI_SIZE", "2"),
             ("TESSERA_CACHE", "text.txt"), ("TESSERA_CACHE", ""), ("TESSERA_CACHE", "missing/cache"),
             ("TESSERA_MAX_CPU_ISA", "odd"), ("TESSERA_MAX_CPU_ISA", "avx2"), ("COLUMNS", "-1")]
PLANS = ["--ranks 1", "--ranks 2", "--tp 2 --heads 2", "--tp 2 --heads 2 --sp --ranks 2",
         "--pp 2 --layers 2 --microbatches 2 --batch 4", "--cp 2", "--cp 2 --cp-mode ulysses --heads 2",
         "--dp-mode ps-async --ranks 2 --batch 4", "--dp-mode ps-sync --ranks 2", "--dp-mode dataparallel --ranks 2",
         "--zero 3 --ranks 2", "--family llama --heads 2 --kv-heads 1",
         "--model llama-nano --layers 1 --ffn 16 --ranks 2", "--ranks 4 --dp 2 --tp 2 --heads 2",
         "--pp 2 --layers 4 --microbatches 2 --batch 4 --schedule interleaved",
         "--pp 2 --layers 4 --microbatches 2 --batch 4 --schedule zb-v",
         "--pp 2 --layers 2 --microbatches 2 --batch 4 --schedule plan.txt", "--dtype bf16 --channels 16"]
QUESTIONS = ["--model gpt2 --hardware h100 --ranks 4 --batch 8", "--model llama2-7b --hardware a100-80 --software megatron --ranks 8 --batch 16",
             "--model model.json --hardware machine.toml --ranks 2 --batch 4", "--model gpt-nano --hardware laptop --ranks 2 --pp 2 --batch 4",
             "--cases cases.jsonl --format json", "--model llama3-8b --hardware a100-80 --ranks 4 --batch 4 --format json"]
# Options that rarely conflict with others.
EASY = ["beta1", "beta2", "bucket-mb", "clip", "deterministic", "dropout", "dtype", "lr", "optimizer", "recompute",
        "seed", "tie-copies", "untied", "weight-decay", "zero"]
FLAGS = {"deterministic", "document-mask", "layout-invariant", "no-eval", "no-save", "qk-norm", "qkv-bias", "quiet", "resume", "sp",
         "tie-copies", "trace", "untied"}
CLASSES = ["closed", "devices", "differ", "memory", "numbers", "rerun", "signals", "stdout", "tmpdir", "ulimit-f",
           "ulimit-v"]


class Lines:
    def __init__(self, program, home, without):
        self.program, self.home, self.without = os.path.abspath(program), home, without
        self.options, self.template = {}, os.path.join(home, "template")
        for command in ("train", "verify", "generate", "data", "report", "bench", "plan"):
            said = subprocess.run([self.program, command, "--help"], capture_output=True, text=True, check=True).stdout
            found = re.findall(r"^  --([a-z][a-z0-9-]*)[ \n]+(.*)$", said, re.M)
            self.options[command] = {name: (re.findall(r"(?<=[: ])[\w.+-]+(?:\|[\w.+-]+)+", text) or [""])[-1] for name, text in found}
        self.make_template()

    def make_template(self):
        t = self.template
        os.makedirs(os.path.join(t, "empty"))
        text = "".join(f"Line {i} of a text that says little.\n" for i in range(60))
        files = {"text.txt": text, "empty.txt": "", "binary.bin": bytes(range(256)) * 8, "plan.txt": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
                 "model.json": '{"layers": 4, "channels": 64, "heads": 4, "vocab": 100, "context": 64, "experts": 4, "experts_per_token": 2}',
                 "machine.toml": 'base = "h100"\nmemory_bytes = 1e9\nranks_per_node = 1\n',
                 "cases.jsonl": '{"model": {"layers": 2, "channels": 64, "heads": 2, "vocab": 100, "context": 64}, "plan": {"dp": 2}, "hardware": "h100"}\n',
                 "good.toml": "layers = 2\nlr = 0.01\n", "bad.toml": "layers = \"two\"\n[x\n"}
        for name, content in files.items():
            Path(t, name).write_bytes(content if isinstance(content, bytes) else content.encode())
        tiny = [w for k, v in TINY.items() for w in ("--" + k, v)]
        train = ["train", *tiny, "--data", "text.txt", "--out"]
        for args in ([*train, "run"], [*train, "traced", "--trace"], ["data", "text.txt", "--out", "tokens"],
                      ["data", "text.txt", "--tokenizer", "bpe", "--vocab", "300", "--out", "tokenizer"]):
            subprocess.run([self.program, *args], cwd=t, check=True, capture_output=True, env=self.environment(t))
        for source, copy in (("run", "broken-run"), ("run", "torn-run"), ("tokenizer", "bad-tokenizer")):
            shutil.copytree(os.path.join(t, source), os.path.join(t, copy))
        os.makedirs(os.path.join(t, "no-run", "checkpoints"))
        for path, keep in (("torn-run/checkpoints/step-2/model.safetensors", 100), ("bad-tokenizer/vocab.json", 30),
                           ("broken-run/checkpoints/step-2/manifest.json", 40), ("broken-run/config.toml", 50)):
            os.truncate(os.path.join(t, path), keep) if os.path.exists(os.path.join(t, path)) else None
        os.symlink("loop", os.path.join(t, "loop"))

    def copy_template(self, directory):
        shutil.copytree(self.template, directory, symlinks=True)
        os.mkfifo(os.path.join(directory, "pipe"))
        os.symlink("text.txt", os.path.join(directory, "link"))
        if os.geteuid() == 0:  # device nodes in the test directory, because they may be overwritten
            for name, minor in (("null", 3), ("full", 7)):
                os.mknod(os.path.join(directory, name), 0o666 | stat.S_IFCHR, os.makedev(1, minor))

    def environment(self, directory):
        parent = os.path.dirname(directory)
        return {"HOME": os.path.join(parent, "home"), "TMPDIR": os.path.join(parent, "tmp"), "PATH": os.environ["PATH"],
                "LC_ALL": "C.UTF-8", "TESSERA_CACHE": "cache", "OMP_WAIT_POLICY": "passive"}

    def value(self, dice, name, choices):
        """(value, class); values with an empty class are always included."""
        kind = dice.random()
        if kind < 0.08:
            return dice.choice(WRONG), ""
        if kind < 0.14:
            extreme = dice.choice(EXTREME)
            if name in ("steps", "ranks", "tokens", "threads-per-rank", "timeout", "trace-steps", "dump", "servers"):
                return dice.choice(["0", "-5", "1e3", "99999999999999999999"]), ""
            return extreme, "memory" if name in SIZES else "numbers"
        if name in PATHS:
            if dice.random() < 0.1:
                return dice.choice(DEVICES), "devices"
            return dice.choice(PATHS[name]), "rerun" if name == "out" else ""
        if choices:
            return (dice.choice(choices.split("|")) if dice.random() < 0.95 else choices.split("|")[0] + "x"), ""
        if name in ("prompt", "benchmark_filter"):
            return dice.choice(["Line", "", "\n", "é", "\x1b[31m", "a" * 500, "%s"]), ""
        if name in ("steps", "tokens"):
            return dice.choice("123"), ""
        if name == "temperature":
            return dice.choice(["0", "1", "0.7"]), ""
        return dice.choice(NUMBERS), ""

    def option(self, dice, command, classes):
        name = dice.choice(EASY if command in ("train", "verify") and dice.random() < 0.5 else sorted(self.options[command]))
        if name in FLAGS:
            return ["--" + name + dice.choice(["", "", "", "=false", "=maybe"])]
        value, kind = self.value(dice, name, self.options[command][name])
        classes.add(kind)
        if dice.random() < 0.04:  # a misspelled name
            at = dice.randrange(len(name))
            name = name[:at] + dice.choice(["", name[at] * 2, "_"]) + name[at + 1:]
        return dice.choice([["--" + name, value], ["--" + name, value], [f"--{name}={value}"]])

    def args(self, dice, command, classes):
        args = [command]
        if command in ("train", "verify"):
            for name, value in TINY.items():
                args += ["--" + name, value]
            if command == "train":
                args += ["--data", dice.choice(["text.txt", "text.txt", "text.txt", "tokens"]), "--out", "new"]
            if dice.random() < 0.6:
                args += dice.choice(PLANS).split()
            if dice.random() < 0.3:
                args += ["--format", "json"]
        elif command == "plan":
            args += dice.choice(QUESTIONS).split()
        elif command == "bench":
            return args + dice.choice(["--benchmark_list_tests", "--device", "--device tpu", "--dvice cpu", "x",
                                        "--benchmark_nonsense=1", "-h", "--help"]).split()
        else:
            args += [dice.choice(INPUTS + ["run", "traced", "text.txt"])] if dice.random() < 0.95 else []
            args += ["--tokens", "3"] if command == "generate" else []
            args += ["--out", "new"] if command != "generate" and dice.random() < 0.7 else []
        for _ in range(dice.choice([0, 1, 1, 2, 2, 3, 5])):
            args += self.option(dice, command, classes)
        if dice.random() < 0.05:
            stray = dice.choice(["", "--", "-", "-h", "--help", "--version", "train", "é", "--layers", "-x"])
            args.insert(dice.randrange(len(args) + 1), stray)
        return args

    def random_config(self, dice, classes):
        lines = []
        for _ in range(dice.randrange(5)):
            name = dice.choice(sorted(self.options["train"]))
            value, kind = self.value(dice, name, self.options["train"][name])
            classes.add(kind)
            quoted = json.dumps(value) if not re.fullmatch(r"[\d.e-]+|true", value) or dice.random() < 0.1 else value
            lines.append(dice.choice([name + " = ", name + "=", name + " = ", name + " ", "[" + name + "] "]) + quoted)
        return "\n".join(lines)

    def rng(self, seed, n, mpi):
        """A line: arguments, environment, preceding shell commands, time and number of a signal, the file drawn.toml."""
        for again in range(1000):
            dice, classes = random.Random(f"{seed}:{n}:{again}:{mpi}"), set()
            others = [] if mpi else ["generate"] * 3 + ["data"] * 3 + ["report"] * 2 + ["bench"] + ["plan"] * 2
            command = dice.choice(["train"] * 7 + ["verify"] * 3 + others)
            args = self.args(dice, command, classes)
            if mpi:
                args = [w for before, w in zip([""] + args, args) if "--ranks" not in (before, w)]  # set by mpirun
            config = self.random_config(dice, classes)
            changes, before, strike = {}, "", None
            for _ in range(dice.choice([0, 0, 0, 1, 2])):
                name, value = dice.choice(VARIABLES)
                changes[name] = value
            if dice.random() < 0.03:
                changes["TMPDIR"] = "missing/tmp"
                classes.add("tmpdir")
            if dice.random() < 0.12:
                kind = dice.choice(sorted(SHELLS))
                if not mpi and not any(re.search("SIZE|RANK|SLURM", name) for name in changes):  # MPI output is not checked here
                    before = dice.choice(SHELLS[kind])
                    classes.add(kind)
            if dice.random() < (0.15 if mpi else 0.07):
                strike = (dice.choice([signal.SIGINT, signal.SIGTERM] + [signal.SIGKILL] * mpi), dice.random() ** 2 * 2)
                classes |= {"signals"} if command != "train" else set()
                args += ["--steps", "100000"] if command == "train" else []
            if mpi and dice.random() < 0.1:
                classes.add("differ")
                args += [":", *self.args(dice, command, classes)]
            if not classes & self.without:
                return args, changes, before, strike, config
        sys.exit("command_lines: every command is excluded")
