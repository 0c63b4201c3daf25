"""Random small models of transformers with the configuration keys of published models.

usage: published_configurations.py CONFIGURATIONS.json, in an empty directory. For each valid one creates a directory
NUMBER with config.json (published keys), model.safetensors, and logits.bin (float32, 2 x 12 x V) of the
ids 7, 8, ... 30.
"""
import json
import os
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
SMALL_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}


def shrunk(config):
    gpt2 = config["model_type"] == "gpt2"
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    out = config | (SMALL_GPT2 if gpt2 else SMALL) | {"vocab_size": 80, "initializer_range": 0.2}
    out |= {key: value for key, value in EXPERTS.items() if config.get(key)}
    if kv_heads:
        out["num_key_value_heads"] = 4 if kv_heads == heads else 2
    if config.get("head_dim"):
        out["head_dim"] = 16 if config["head_dim"] * heads == config["hidden_size"] else 24
    if config.get("layer_types"):
        out["layer_types"] = config["layer_types"][:2]
    return out | {key: 0 for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}


def main():
    torch.set_num_threads(1)
    everything = json.load(open(sys.argv[1], encoding="utf-8"))
    for number, (name, base, more, expected) in enumerate(everything["models"]):
        if expected.startswith("refused"):
            continue
        folder = str(number)
        os.mkdir(folder)
        config = shrunk(everything["bases"][base] | more)
        with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
        model = model.float().eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(f"{folder}/its")
        os.replace(f"{folder}/its/model.safetensors", f"{folder}/model.safetensors")
        with torch.no_grad():
            logits = model(input_ids=torch.arange(7, 31).reshape(2, 12), use_cache=False).logits
        logits.numpy().tofile(f"{folder}/logits.bin")


if __name__ == "__main__":
    main()
