// One table that names every option of `train`, from which the command line, the configuration file, its resolved copy
// and the help are all made.
#pragma once
#include <string_view>

#include "app/options.h"
#include "models/presets.h"

namespace tessera {

// One option: its name without dashes (the key in a configuration file too), and what --help says.
struct OptionInfo {
  std::string_view name, group, help;
  std::string_view choices = "";  // "fp32|bf16": the only values allowed
  double least = -1e300, most = 1e300;
  bool most_excluded = false;  // the value stays below `most`
  bool in_file = true;         // false: about this call of the program, so not part of a configuration
};

constexpr double kMostSteps = 1e12;  // times ranks, still far from the end of 64 bits

constexpr OptionInfo not_in_file(OptionInfo info) {
  info.in_file = false;
  return info;
}

// Calls f(OptionInfo, field) for every option of `train`, in the order of --help.
template <class Options, class F>
void for_each_option(Options&& o, F&& f) {
  f(OptionInfo{"model", "Model", "sizes by name", preset_names()}, o.model);
  f(OptionInfo{"family", "Model", "how layers are built; default: that of --model", "gpt2|llama"}, o.family);
  f(OptionInfo{"layers", "Model", "transformer blocks", "", 1, 100000}, o.layers);
  f(OptionInfo{"heads", "Model", "attention heads; must divide the channels", "", 1, 1e6}, o.heads);
  f(OptionInfo{"kv-heads", "Model", "heads of keys and values, which queries share; must divide the heads", "", 1, 1e6},
    o.kv_heads);
  f(OptionInfo{"head-dim", "Model", "numbers of a head; default: channels / heads", "", 1, 1e6}, o.head_dim);
  f(OptionInfo{"channels", "Model", "width of the model", "", 1, 1e6}, o.channels);
  f(OptionInfo{"ffn", "Model", "hidden channels of a feed-forward layer; default: 4 times the channels", "", 1, 1e7},
    o.ffn);
  f(OptionInfo{"context", "Model", "tokens that the model sees at once", "", 1, 1e9}, o.context);
  f(OptionInfo{"vocab", "Model", "pads the tokenizer's vocabulary to this size", "", 1, 1e9}, o.vocab);
  f(OptionInfo{"untied", "Model", "the head is a table of its own, not the token embedding"}, o.untied);
  f(OptionInfo{"rope-theta", "Model", "base of the rotary positions' frequencies [10000]", "", 1, 1e12}, o.rope_theta);
  f(OptionInfo{"rope-scaling", "Model", "how rotary positions reach a longer context", "none|linear|llama3"},
    o.rope_scaling);
  f(OptionInfo{"rope-factor", "Model", "of --rope-scaling: how many times longer [1]", "", 1, 1e6}, o.rope_factor);
  f(OptionInfo{"rope-low-freq", "Model", "of llama3 scaling: turns per context below which a frequency is divided [1]",
               "", 0, 1e6},
    o.rope_low_freq);
  f(OptionInfo{"rope-high-freq", "Model", "of llama3 scaling: turns per context above which it is kept [4]", "", 0,
               1e6},
    o.rope_high_freq);
  f(OptionInfo{"rope-original-context", "Model", "of llama3 scaling: the context before it [8192]", "", 1, 1e9},
    o.rope_original_context);
  f(OptionInfo{"qkv-bias", "Model", "biases of q, k and v in the llama family, as in Qwen2"}, o.qkv_bias);
  f(OptionInfo{"qk-norm", "Model", "each head of q and k is normalised, as in Qwen3"}, o.qk_norm);
  f(OptionInfo{"norm-eps", "Model", "what norms add to the mean square [1e-5]", "", 0, 1}, o.norm_eps);
  f(OptionInfo{"dropout", "Model", "probability of dropping an activation", "", 0, 1, true}, o.dropout);
  f(OptionInfo{"dtype", "Model", "parameters and activations; bf16 keeps fp32 master weights; fp64 is for verify",
               "fp32|bf16|fp64"},
    o.dtype);
  f(OptionInfo{"data", "Data",
               "austen, tinyshakespeare, a text file (.gz and .zst too), llm.c's token file, a folder made by `tessera "
               "data`, or, to be "
               "tuned on, a file of examples, FILE.jsonl"},
    o.data);
  f(OptionInfo{"tokenizer", "Data",
               "char, bytes, bpe, or a folder with tokenizer.json, or vocab.json and merges.txt; default: char for "
               "nano and mini models, "
               "bpe for others"},
    o.tokenizer);
  f(OptionInfo{"batch", "Data", "sequences per step", "", 1, 1e9}, o.batch);
  f(OptionInfo{"microbatches", "Data", "parts that a step's batch is cut into, one after another", "", 1, 1e9},
    o.microbatches);
  f(OptionInfo{"document-mask", "Data",
               "attention stays within a document, and positions begin again in each; for tokens with <|endoftext|>"},
    o.document_mask);
  f(OptionInfo{"init", "Fine-tuning", "weights, sizes and tokenizer of a run, checkpoint or Hugging Face folder"},
    o.init);
  f(OptionInfo{"template", "Fine-tuning",
               "what stands around the turns of an example; auto: chatml for messages, alpaca for instructions, none "
               "for the rest",
               "auto|chatml|llama3|alpaca|none"},
    o.chat_template);
  f(OptionInfo{"train-on", "Fine-tuning", "what of an example is learnt", "responses|all"}, o.train_on);
  f(OptionInfo{"pack", "Fine-tuning", "several examples in a sequence, each of which sees itself alone"}, o.pack);
  f(OptionInfo{"skip-bad", "Fine-tuning",
               "lines that are no example, or have nothing to learn, are counted and left out"},
    o.skip_bad);
  f(
      OptionInfo{
          "lora-rank", "Fine-tuning",
          "adapters of this rank learn (LoRA), and the model that --init names stays as it is; 0: all of it learns", "",
          0, 1e6},
      o.lora_rank);
  f(OptionInfo{"lora-alpha", "Fine-tuning", "adapters count by alpha / rank; default: the rank", "", 0, 1e6},
    o.lora_alpha);
  f(OptionInfo{"lora-dropout", "Fine-tuning", "probability of dropping what goes into an adapter", "", 0, 1, true},
    o.lora_dropout);
  f(OptionInfo{"lora-rslora", "Fine-tuning", "adapters count by alpha / sqrt(rank) instead"}, o.lora_rslora);
  f(OptionInfo{"lora-targets", "Fine-tuning",
               "layers with adapters, separated by commas, or all; default: q_proj,v_proj, of gpt2 c_attn"},
    o.lora_targets);
  f(OptionInfo{"ranks", "Plan", "ranks; default: 2 where the batch can be halved; under mpirun those of the job", "", 1,
               1024},
    o.ranks);
  f(OptionInfo{"dp", "Plan", "data-parallel ranks; default: those that the other axes leave", "", 1, 1024}, o.dp);
  f(OptionInfo{"tp", "Plan", "tensor-parallel ranks: each has a part of every matrix", "", 1, 1024}, o.tp);
  f(OptionInfo{"sp", "Plan", "with --tp: cuts the tokens between the blocks too (sequence parallel)"}, o.sp);
  f(
      OptionInfo{
          "tie-copies", "Plan",
          "sums the gradients of a tied weight's uses apart, as a pipeline does: one rank then has a pipeline's bits"},
      o.tie_copies);
  f(OptionInfo{"cp", "Plan", "context-parallel ranks: each has a part of the tokens of every sequence", "", 1, 1024},
    o.cp);
  f(OptionInfo{"cp-mode", "Plan", "attention over the parts: keys go around a ring, or heads are dealt out",
               "ring|ulysses"},
    o.cp_mode);
  f(OptionInfo{"pp", "Plan", "pipeline-parallel ranks: each has some of the layers", "", 1, 1024}, o.pp);
  f(
      OptionInfo{
          "schedule", "Plan",
          "of the pipeline: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, or a file with one line per rank"},
      o.schedule);
  f(OptionInfo{"chunks", "Plan", "stages of each pipeline rank, with --schedule interleaved; default: 2", "", 1, 1024},
    o.chunks);
  f(OptionInfo{"zero", "Plan", "ZeRO stage: shares out optimizer state (1), gradients (2), parameters (3)", "", 0, 3},
    o.zero);
  f(OptionInfo{"dp-mode", "Plan", "how data-parallel ranks work together", "ddp|dataparallel|ps-sync|ps-async"},
    o.dp_mode);
  f(OptionInfo{"servers", "Plan", "parameter servers, on the first ranks", "", 1, 1024}, o.servers);
  f(OptionInfo{"staleness", "Plan", "steps that a worker of ps-async may be ahead of the slowest", "", 0, 1e6},
    o.staleness);
  f(not_in_file({"record", "Plan", "file for the order in which ps-async applied what"}), o.record);
  f(not_in_file({"replay", "Plan", "file with such an order, to be repeated; with --resume the one that was begun"}),
    o.replay);
  f(OptionInfo{"bucket-mb", "Plan", "gradients that ddp sends at once, in MiB", "", 1e-6, 1e6}, o.bucket_mb);
  f(OptionInfo{"grad-dtype", "Plan", "of gradients while they are summed and sent", "fp32|bf16"}, o.grad_dtype);
  f(OptionInfo{"all-reduce", "Plan", "algorithm of sums over ranks", "direct|ring|tree|root|native"}, o.all_reduce);
  f(OptionInfo{"offload", "Plan",
               "what waits elsewhere between updates: in a mapped file, or of a GPU in the host's memory",
               "none|optimizer"},
    o.offload);
  f(not_in_file(
        {"backend", "Place",
         "threads of one process, or processes of mpirun (default: what started the program); nccl: either, with a "
         "GPU each",
         "threads|mpi|nccl"}),
    o.backend);
  f(OptionInfo{"timeout", "Place", "seconds that a rank waits for another", "", 0.01, 1e6}, o.timeout);
  f(OptionInfo{"device", "Place",
               "where ranks compute; cuda: the GPU of each rank's number, shared where GPUs are fewer", "cpu|cuda"},
    o.device);
  f(OptionInfo{"cuda-graph", "Place",
               "a step as one CUDA graph, launched again at every step; auto: on one rank, and on ranks over NCCL that "
               "send no messages (no --pp, no ring)",
               "auto|on|off"},
    o.cuda_graph);
  f(
      OptionInfo{
          "attention", "Place",
          "on a GPU, whose kernels: cuDNN's where they serve the model, or our own; default: cudnn where it is built, "
          "for verify own",
          "cudnn|own"},
      o.attention);
  f(OptionInfo{"deterministic", "Place",
               "the same bits in every run on a GPU too, for some speed; on the CPU they always are"},
    o.deterministic);
  f(OptionInfo{"threads-per-rank", "Place", "threads of a rank; default: the cores, divided among the ranks", "", 1,
               1024},
    o.threads_per_rank);
  f(OptionInfo{"recompute", "Place", "what backward makes again instead of keeping; gelu is another name of activation",
               "none|activation|activation+norm|attention|block|gelu|gelu+norm"},
    o.recompute);
  f(OptionInfo{"optimizer", "Optimisation", "update rule", "sgd|adam|adamw"}, o.optimizer);
  f(OptionInfo{"momentum", "Optimisation", "of sgd", "", 0, 1, true}, o.momentum);
  f(OptionInfo{"steps", "Optimisation", "updates", "", 1, kMostSteps}, o.steps);
  f(OptionInfo{"lr", "Optimisation", "learning rate after the warm-up", "", 0}, o.lr);
  f(OptionInfo{"min-lr", "Optimisation", "learning rate at the end of the cosine; default: a tenth of --lr", "", 0},
    o.min_lr);
  f(OptionInfo{"warmup", "Optimisation", "steps of linear warm-up", "", 0, kMostSteps}, o.warmup);
  f(OptionInfo{"state-dtype", "Optimisation",
               "of the optimizer's moments; bf16, with --dtype bf16: no master weights either, all rounded "
               "stochastically (8 bytes per parameter with --grad-dtype bf16)",
               "fp32|bf16"},
    o.state_dtype);
  f(OptionInfo{"weight-decay", "Optimisation", "on matrices only", "", 0}, o.weight_decay);
  f(OptionInfo{"beta1", "Optimisation", "Adam's decay of the mean", "", 0, 1, true}, o.beta1);
  f(OptionInfo{"beta2", "Optimisation", "Adam's decay of the mean square", "", 0, 1, true}, o.beta2);
  f(OptionInfo{"clip", "Optimisation", "largest global gradient norm; 0 does not clip", "", 0}, o.clip);
  f(OptionInfo{"seed", "Optimisation", "of weights, data order and dropout", "", 0}, o.seed);
  f(not_in_file({"out", "Files",
                 "run directory (settings, metrics, TensorBoard events, checkpoints); default: runs/DATE-TIME"}),
    o.out);
  f(OptionInfo{"save-every", "Files", "steps between checkpoints; 0: only the last", "", 0, kMostSteps}, o.save_every);
  f(OptionInfo{"keep", "Files", "checkpoints that stay, the newest ones; the best by validation stays too", "", 1, 1e6},
    o.keep);
  f(OptionInfo{"check-replicas", "Files",
               "steps between comparisons of what several ranks hold copies of, which every save makes too; 0: none",
               "", 0, kMostSteps},
    o.check_replicas);
  f(OptionInfo{"eval-every", "Files", "steps between validations; 0: only the last", "", 0, kMostSteps}, o.eval_every);
  f(OptionInfo{"no-save", "Files", "no checkpoint, not even the last: for measurements; such a run cannot be resumed"},
    o.no_save);
  f(OptionInfo{"no-eval", "Files", "no validation, not even the last"}, o.no_eval);
  f(not_in_file({"resume", "Files", "continue the run in --out from its newest checkpoint"}), o.resume);
  f(not_in_file({"config", "Files", "TOML file with the same keys; options win"}), o.config);
  f(not_in_file({"format", "Output", "of standard output", "text|json"}), o.format);
  f(not_in_file({"quiet", "Output", "no progress"}), o.quiet);
  f(not_in_file({"trace", "Output", "writes a timeline into the run directory; `tessera report` draws it"}), o.trace);
  f(not_in_file({"trace-steps", "Output", "with --trace: how many steps are kept, the last ones", "", 1, 1e6}),
    o.trace_steps);
}

}  // namespace tessera
