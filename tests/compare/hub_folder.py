"""Loads model folders written by Tessera with Hugging Face's transformers, and saves them again with it.

usage: hub_folder.py FOLDER...: each contains a model and ids.bin (int32, B x T with T = 12). Writes FOLDER/logits.bin
(float32, B x T x V) and FOLDER/again, a folder with several shards. Fails for missing or unexpected tensors.
"""
import os
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main():
    torch.set_num_threads(1)
    for folder in sys.argv[1:]:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        wrong = {key: names for key, names in info.items() if names}
        if wrong:
            raise SystemExit(f"{folder}: {wrong}")
        ids = torch.from_numpy(np.fromfile(os.path.join(folder, "ids.bin"), np.int32)).reshape(-1, 12).long()
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, use_cache=False).logits
        logits.numpy().tofile(os.path.join(folder, "logits.bin"))
        model.save_pretrained(os.path.join(folder, "again"), max_shard_size="8KB")


if __name__ == "__main__":
    main()
