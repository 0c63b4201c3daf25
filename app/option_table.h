// One table that names every option of `train`, from which the command line, the configuration file, its resolved copy
// and the help are all made.
#pragma once
#include <string_view>

#include "app/options.h"
#include "models/language_model.h"

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
  f(OptionInfo{"model", "Model", "sizes of a known model", preset_names()}, o.model);
  f(OptionInfo{"family", "Model", "kind of layers; default: that of --model", "gpt2|llama"}, o.family);
  f(OptionInfo{"layers", "Model", "transformer blocks", "", 1, 100000}, o.layers);
  f(OptionInfo{"heads", "Model", "attention heads; must divide the channels", "", 1, 1e6}, o.heads);
  f(OptionInfo{"kv-heads", "Model", "heads of keys and values (grouped-query attention); must divide the heads", "", 1,
               1e6},
    o.kv_heads);
  f(OptionInfo{"head-dim", "Model", "channels of one head; default: channels / heads", "", 1, 1e6}, o.head_dim);
  f(OptionInfo{"channels", "Model", "width of the model", "", 1, 1e6}, o.channels);
  f(OptionInfo{"ffn", "Model",
               "hidden channels of a feed-forward layer, or of an expert; default: 4 times the channels", "", 1, 1e7},
    o.ffn);
  f(OptionInfo{"context", "Model", "tokens that the model sees at once", "", 1, 1e9}, o.context);
  f(OptionInfo{"vocab", "Model", "pads the tokenizer's vocabulary to this size", "", 1, 1e9}, o.vocab);
  f(OptionInfo{"untied", "Model", "gives the head its own table; default: that of the tokens"}, o.untied);
  f(OptionInfo{"rope-theta", "Model", "base of the rotary positions' frequencies [10000]", "", 1, 1e12}, o.rope_theta);
  f(OptionInfo{"rope-scaling", "Model", "way for rotary positions to reach a longer context", "none|linear|llama3"},
    o.rope_scaling);
  f(OptionInfo{"rope-factor", "Model", "with --rope-scaling: how many times longer the context gets [1]", "", 1, 1e6},
    o.rope_factor);
  f(OptionInfo{"rope-low-freq", "Model", "with llama3 scaling: divides frequencies of fewer turns per context [1]", "",
               0, 1e6},
    o.rope_low_freq);
  f(OptionInfo{"rope-high-freq", "Model", "with llama3 scaling: keeps frequencies of more turns per context [4]", "", 0,
               1e6},
    o.rope_high_freq);
  f(OptionInfo{"rope-original-context", "Model", "with llama3 scaling: the context before it [8192]", "", 1, 1e9},
    o.rope_original_context);
  f(OptionInfo{"qkv-bias", "Model", "adds biases to q, k and v in the llama family, as Qwen2 does"}, o.qkv_bias);
  f(OptionInfo{"qk-norm", "Model", "normalises each head of q and k, as Qwen3 does"}, o.qk_norm);
  f(OptionInfo{"norm-eps", "Model", "epsilon of the norms [1e-5]", "", 0, 1}, o.norm_eps);
  f(OptionInfo{"experts", "Model",
               "experts of each layer, in place of its feed-forward layer (mixture of experts); 0: none", "", 0, 1e4},
    o.experts);
  f(OptionInfo{"experts-per-token", "Model", "with --experts: how many of them a token goes to [2]", "", 1, 1e4},
    o.experts_per_token);
  f(OptionInfo{"shared-experts", "Model",
               "with --experts: every token also goes to a layer of so many times their width [0]", "", 0, 1e4},
    o.shared_experts);
  f(OptionInfo{"expert-capacity", "Model",
               "with --experts: an expert takes at most this many times its even share of a sequence, and drops the "
               "rest; 0 drops none [0]",
               "", 0, 1e6},
    o.expert_capacity);
  f(OptionInfo{"router-softmax", "Model",
               "with --experts: weights are shares among the chosen experts, or among all of them [chosen]",
               "chosen|all"},
    o.router_softmax);
  f(OptionInfo{"balance-loss", "Model", "with --experts: weight of the loss that balances them [0.01]", "", 0, 1e6},
    o.balance_loss);
  f(OptionInfo{"z-loss", "Model", "with --experts: weight of the loss that keeps the router's logits small [0.001]", "",
               0, 1e6},
    o.z_loss);
  f(OptionInfo{"dropout", "Model", "probability of dropping an activation", "", 0, 1, true}, o.dropout);
  f(OptionInfo{"dtype", "Model",
               "type of parameters and activations; bf16 keeps fp32 master weights; fp64 is for verify",
               "fp32|bf16|fp64"},
    o.dtype);
  f(
      OptionInfo{
          "data", "Data",
          "austen, tinyshakespeare, a text file (.gz and .zst too), a token file of llm.c, a folder or 'pattern*' of "
          "them, a folder made by `tessera data`, or a file of examples for fine-tuning, FILE.jsonl; or a mixture: "
          "A=0.7,B=0.3, or a .json or .toml file of names and weights"},
      o.data);
  f(OptionInfo{"tokenizer", "Data",
               "char, bytes, bpe, bpe-N of at most N tokens (bpe: 50257), or a folder with tokenizer.json, or "
               "vocab.json and merges.txt; default: char for nano and mini models, bpe for others"},
    o.tokenizer);
  f(OptionInfo{"batch", "Data", "sequences per step", "", 1, 1e9}, o.batch);
  f(OptionInfo{"microbatches", "Data", "micro-batches of a data rank in a step, computed one after another", "", 1,
               1e9},
    o.microbatches);
  f(OptionInfo{"shuffle", "Data",
               "reads each window of a text once in an epoch, in a random order, as it is for shards and mixtures; "
               "without it windows begin at random places"},
    o.shuffle);
  f(OptionInfo{"document-mask", "Data",
               "keeps attention within a document and restarts positions in each; needs tokens with <|endoftext|>"},
    o.document_mask);
  f(OptionInfo{"init", "Fine-tuning",
               "starts from the weights, sizes and tokenizer of a run, a checkpoint or a Hugging Face folder"},
    o.init);
  f(OptionInfo{"template", "Fine-tuning",
               "text around the turns of an example; auto: chatml for messages, alpaca for instructions, none for the "
               "rest",
               "auto|chatml|llama3|alpaca|none"},
    o.chat_template);
  f(OptionInfo{"train-on", "Fine-tuning", "part of an example that counts in the loss", "responses|all"}, o.train_on);
  f(OptionInfo{"pack", "Fine-tuning", "puts several examples into one sequence; none of them sees another"}, o.pack);
  f(OptionInfo{"skip-bad", "Fine-tuning", "skips and counts lines that are no example or have nothing to learn"},
    o.skip_bad);
  f(OptionInfo{"lora-rank", "Fine-tuning",
               "trains adapters of this rank (LoRA) and freezes the model of --init; 0: trains the whole model", "", 0,
               1e6},
    o.lora_rank);
  f(OptionInfo{"lora-alpha", "Fine-tuning", "scales adapters by alpha / rank; default: the rank", "", 0, 1e6},
    o.lora_alpha);
  f(OptionInfo{"lora-dropout", "Fine-tuning", "probability of dropping an input of an adapter", "", 0, 1, true},
    o.lora_dropout);
  f(OptionInfo{"lora-rslora", "Fine-tuning", "scales adapters by alpha / sqrt(rank) instead"}, o.lora_rslora);
  f(OptionInfo{"lora-targets", "Fine-tuning",
               "layers with adapters, separated by commas, or all; default: q_proj,v_proj, and c_attn for gpt2"},
    o.lora_targets);
  f(OptionInfo{"quantize", "Fine-tuning",
               "keeps frozen weights of the layers in 4 bits (QLoRA): nf4, or gptq for a model that "
               "`tessera checkpoint quantize` made; default: as --init has them",
               "none|nf4|gptq"},
    o.quantize);
  f(OptionInfo{"quantize-group", "Fine-tuning", "with gptq: columns that share a scale, -1 for all; default: 128", "",
               -1, 1e6},
    o.quantize_group);
  f(OptionInfo{"ranks", "Plan", "number of ranks; default: 2 if the batch can be halved; under mpirun those of the job",
               "", 1, 1024},
    o.ranks);
  f(OptionInfo{"dp", "Plan", "data-parallel ranks; default: as many as the other axes leave", "", 1, 1024}, o.dp);
  f(OptionInfo{"tp", "Plan", "tensor-parallel ranks: each has a part of every matrix", "", 1, 1024}, o.tp);
  f(OptionInfo{"ep", "Plan",
               "expert-parallel ranks: those of --dp x --cp share out the experts of each layer in groups of so many",
               "", 1, 1024},
    o.ep);
  f(OptionInfo{"sp", "Plan", "with --tp: also cuts the tokens between the blocks (sequence parallel)"}, o.sp);
  f(OptionInfo{"tie-copies", "Plan",
               "sums the two gradients of a tied weight as a pipeline does; one rank then has a pipeline's bits"},
    o.tie_copies);
  f(OptionInfo{"cp", "Plan", "context-parallel ranks: each has a part of the tokens of every sequence", "", 1, 1024},
    o.cp);
  f(OptionInfo{"cp-mode", "Plan", "attention over the parts: keys go around a ring, or ranks exchange tokens for heads",
               "ring|ulysses"},
    o.cp_mode);
  f(OptionInfo{"pp", "Plan", "pipeline-parallel ranks: each has some of the layers", "", 1, 1024}, o.pp);
  f(OptionInfo{"schedule", "Plan",
               "pipeline schedule: naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, v-half, v-min, or a file with "
               "one line per rank"},
    o.schedule);
  f(OptionInfo{"chunks", "Plan", "stages of each pipeline rank, with --schedule interleaved; default: 2", "", 1, 1024},
    o.chunks);
  f(OptionInfo{"zero", "Plan", "ZeRO stage: shares out optimizer state (1), gradients too (2), parameters too (3)", "",
               0, 3},
    o.zero);
  f(OptionInfo{"shard-ranks", "Plan",
               "with --zero: data ranks of a group that shares out what --zero says; groups hold copies; default: all",
               "", 1, 1024},
    o.shard_ranks);
  f(OptionInfo{"dp-mode", "Plan", "how data-parallel ranks work together", "ddp|dataparallel|ps-sync|ps-async|diloco"},
    o.dp_mode);
  f(OptionInfo{"sync-every", "Plan", "with --dp-mode diloco: steps that each data rank makes alone", "", 1, 1e9},
    o.sync_every);
  f(OptionInfo{"sync-fragments", "Plan",
               "with --dp-mode diloco: parts that the layers are in; they are summed in different steps", "", 1, 1e6},
    o.sync_fragments);
  f(OptionInfo{"outer-lr", "Plan", "with --dp-mode diloco: learning rate of the step that all make together", "", 0,
               1e3},
    o.outer_lr);
  f(OptionInfo{"outer-momentum", "Plan", "with --dp-mode diloco: Nesterov momentum of that step", "", 0, 1, true},
    o.outer_momentum);
  f(OptionInfo{"servers", "Plan", "number of parameter servers; they are on the first ranks", "", 1, 1024}, o.servers);
  f(OptionInfo{"staleness", "Plan", "steps that a worker of ps-async may be ahead of the slowest", "", 0, 1e6},
    o.staleness);
  f(not_in_file({"record", "Plan", "writes the order of the pushes of ps-async to this file"}), o.record);
  f(not_in_file({"replay", "Plan", "repeats the order in this file; with --resume: the file that the run began with"}),
    o.replay);
  f(OptionInfo{"bucket-mb", "Plan", "size of a bucket: the gradients that ddp sends in one call, in MiB", "", 1e-6,
               1e6},
    o.bucket_mb);
  f(OptionInfo{"grad-dtype", "Plan", "type of gradients while they are summed and sent", "fp32|bf16"}, o.grad_dtype);
  f(OptionInfo{"all-reduce", "Plan", "algorithm that sums over ranks", "direct|ring|tree|root|native"}, o.all_reduce);
  f(
      OptionInfo{
          "offload", "Plan",
          "keeps elsewhere, between uses: optimizer state, in a mapped file, or, with a GPU, in the host's memory; "
          "or parameters, with --zero 3 and a GPU, in the host's memory",
          "none|optimizer|parameters"},
      o.offload);
  f(not_in_file({"backend", "Place",
                 "ranks are threads of one process, processes of mpirun, or processes that meet over TCP (default: as "
                 "the program "
                 "was started); nccl: any of them, with a GPU each",
                 "threads|mpi|nccl|tcp"}),
    o.backend);
  f(not_in_file(
        {"rendezvous", "Place", "HOST:PORT on the host of rank 0, where the processes of --ranks meet without mpirun"}),
    o.rendezvous);
  f(not_in_file({"rank", "Place", "with --rendezvous: which of --ranks this process is, from 0", "", 0, 1023}), o.rank);
  f(OptionInfo{"timeout", "Place", "seconds that a rank waits for another", "", 0.01, 1e6}, o.timeout);
  f(OptionInfo{"device", "Place",
               "where ranks compute; cuda: rank r uses GPU r, and ranks share GPUs if there are fewer", "cpu|cuda"},
    o.device);
  f(OptionInfo{"cuda-graph", "Place",
               "captures a step as one CUDA graph and launches it at every step; auto: on one rank, and on NCCL ranks "
               "that send no messages (no --pp, no ring)",
               "auto|on|off"},
    o.cuda_graph);
  f(
      OptionInfo{
          "attention", "Place",
          "attention kernels on a GPU: cuDNN's where they can run the model, or our own; default: cudnn if it is built "
          "in, own for verify",
          "cudnn|own"},
      o.attention);
  f(OptionInfo{"deterministic", "Place",
               "gives the same bits in every run on a GPU, and costs some speed; the CPU always does"},
    o.deterministic);
  f(OptionInfo{"threads-per-rank", "Place", "threads of each rank; default: the cores, divided among the ranks", "", 1,
               1024},
    o.threads_per_rank);
  f(OptionInfo{"recompute", "Place",
               "what the backward pass computes again instead of keeping it; gelu is another name of activation",
               "none|activation|activation+norm|attention|block|gelu|gelu+norm"},
    o.recompute);
  f(OptionInfo{"optimizer", "Optimisation", "update rule; muon: of matrices of layers, and adamw of the rest",
               "sgd|adam|adamw|muon"},
    o.optimizer);
  f(OptionInfo{"momentum", "Optimisation", "momentum of sgd [0.9], and of the matrices of muon [0.95]", "", 0, 1, true},
    o.momentum);
  f(OptionInfo{"steps", "Optimisation", "optimizer steps", "", 1, kMostSteps}, o.steps);
  f(OptionInfo{"lr", "Optimisation", "learning rate after the warm-up", "", 0}, o.lr);
  f(OptionInfo{"min-lr", "Optimisation", "learning rate at the end of the cosine; default: a tenth of --lr", "", 0},
    o.min_lr);
  f(OptionInfo{"warmup", "Optimisation", "steps of linear warm-up", "", 0, kMostSteps}, o.warmup);
  f(OptionInfo{"state-dtype", "Optimisation",
               "type of the optimizer's moments; bf16, with --dtype bf16: keeps no master weights and rounds "
               "stochastically (8 bytes per parameter with --grad-dtype bf16)",
               "fp32|bf16"},
    o.state_dtype);
  f(OptionInfo{"weight-decay", "Optimisation", "weight decay of matrices; other parameters have none", "", 0},
    o.weight_decay);
  f(OptionInfo{"beta1", "Optimisation", "Adam's decay of the mean", "", 0, 1, true}, o.beta1);
  f(OptionInfo{"beta2", "Optimisation", "Adam's decay of the mean square", "", 0, 1, true}, o.beta2);
  f(OptionInfo{"clip", "Optimisation", "largest global gradient norm; 0 does not clip", "", 0}, o.clip);
  f(OptionInfo{"seed", "Optimisation", "seed of weights, data order and dropout", "", 0}, o.seed);
  f(not_in_file({"out", "Files",
                 "run directory (settings, metrics, TensorBoard events, checkpoints); default: runs/DATE-TIME"}),
    o.out);
  f(OptionInfo{"save-every", "Files", "steps between checkpoints; 0: only the last", "", 0, kMostSteps}, o.save_every);
  f(OptionInfo{"keep", "Files", "newest checkpoints to keep; the best by validation is kept too", "", 1, 1e6}, o.keep);
  f(OptionInfo{"check-replicas", "Files",
               "steps between checks that the copies of several ranks are equal; every save checks too; 0: no others",
               "", 0, kMostSteps},
    o.check_replicas);
  f(OptionInfo{"eval-every", "Files", "steps between validations; 0: only the last", "", 0, kMostSteps}, o.eval_every);
  f(OptionInfo{"no-save", "Files",
               "writes no checkpoint, not even the last: for measurements; such a run cannot be resumed"},
    o.no_save);
  f(OptionInfo{"no-eval", "Files", "makes no validation, not even the last"}, o.no_eval);
  f(not_in_file({"resume", "Files", "continue the run in --out from its newest checkpoint"}), o.resume);
  f(not_in_file({"restarts", "Restarts",
                 "starts a run that fails again from its newest checkpoint, so many times at most", "", 0, 1e6}),
    o.restarts);
  f(not_in_file({"launch", "Restarts",
                 "words in front of each start, such as \"mpirun -n {ranks}\" or \"srun -n {ranks}\"; default: none, "
                 "ranks are threads"}),
    o.launch);
  f(not_in_file(
        {"hostfile", "Restarts",
         "hosts and their slots, as mpirun reads them, read before each start: with fewer slots than ranks there "
         "are fewer data ranks, and more micro-batches on each"}),
    o.hostfile);
  f(not_in_file({"config", "Files",
                 "file of lines KEY = VALUE with the same keys; an option of the command line wins over its key"}),
    o.config);
  f(not_in_file({"format", "Output", "format of standard output", "text|json"}), o.format);
  f(not_in_file({"quiet", "Output", "prints no progress, and no sample of text at the end"}), o.quiet);
  f(not_in_file({"trace", "Output", "writes a timeline into the run directory; `tessera report` draws it"}), o.trace);
  f(not_in_file({"trace-steps", "Output", "with --trace: how many of the last steps are kept", "", 1, 1e6}),
    o.trace_steps);
}

}  // namespace tessera
