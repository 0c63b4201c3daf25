// What the commands can be told: plain structs.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

using Words = std::vector<std::pair<std::string, std::string>>;  // of options: name, text

struct TrainOptions {
  // model; sizes that are not given come from the preset
  std::string model = "gpt-nano";
  std::optional<std::string> family;
  std::optional<int64_t> layers, heads, kv_heads, head_dim, channels, ffn, context, vocab;
  std::optional<bool> untied, qkv_bias, qk_norm;
  std::optional<double> norm_eps, rope_theta;
  std::optional<std::string> rope_scaling;
  std::optional<double> rope_factor, rope_low_freq, rope_high_freq;
  std::optional<int64_t> rope_original_context;
  std::optional<int64_t> experts, experts_per_token, shared_experts;
  std::optional<double> expert_capacity, balance_loss, z_loss;
  std::optional<std::string> router_softmax;
  double dropout = 0;
  std::string dtype = "fp32";
  // data
  std::string data = "austen";
  std::optional<std::string> init, tokenizer;
  int64_t batch = 12, microbatches = 1;
  bool shuffle = false, document_mask = false;
  // fine-tuning
  std::string chat_template = "auto", train_on = "responses";
  bool pack = false, skip_bad = false;
  int64_t lora_rank = 0;
  std::optional<double> lora_alpha;
  double lora_dropout = 0;
  bool lora_rslora = false;
  std::optional<std::string> lora_targets, quantize;
  std::optional<int64_t> quantize_group;
  // plan
  std::optional<int64_t> ranks, dp, tp, pp, cp;
  int64_t ep = 1;
  bool sp = false, tie_copies = false;
  std::string schedule = "1f1b";
  std::optional<int64_t> chunks;
  std::string cp_mode = "ring";
  int64_t zero = 0;
  std::optional<int64_t> shard_ranks;
  std::string dp_mode = "ddp";
  int64_t sync_every = 1, sync_fragments = 1;
  double outer_lr = 0.7, outer_momentum = 0.9;
  int64_t servers = 1, staleness = 1;
  std::optional<std::string> record, replay;
  double bucket_mb = 4;
  std::string grad_dtype = "fp32", all_reduce = "direct";
  std::string offload = "none";
  // place
  std::string device = "cpu", cuda_graph = "auto";
  std::optional<std::string> attention;  // of a GPU
  bool deterministic = false;
  std::optional<std::string> backend, rendezvous;
  std::optional<int64_t> rank;
  double timeout = 300;
  std::optional<int64_t> threads_per_rank;
  std::string recompute = "none";
  // optimisation
  std::string optimizer = "adamw";
  std::optional<double> momentum;
  int64_t steps = 3000;
  double lr = 1e-3;
  std::optional<double> min_lr;  // a tenth of lr
  int64_t warmup = 100;
  std::string state_dtype = "fp32";
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.99, clip = 1;
  int64_t seed = 1337;
  // files
  std::optional<std::string> out;
  int64_t save_every = 500, keep = 2, eval_every = 500;
  int64_t check_replicas = 0;
  bool no_save = false, no_eval = false;
  bool resume = false;
  int64_t restarts = 0;
  std::optional<std::string> launch, hostfile;
  std::optional<std::string> config;
  // output
  std::string format = "text";
  bool quiet = false;
  bool trace = false;
  int64_t trace_steps = 10;
};

// `verify` trains counted random tokens under a plan, beside one rank.
struct VerifyOptions {
  TrainOptions run;
  std::optional<std::string> defect = {};  // the name of one, "random" or "list"
  bool hide = false;
};
TrainOptions verify_defaults();

// Of commands that use a model: a run directory, a checkpoint in one, or the folder of a model or of adapters.
struct GenerateOptions {
  std::string from;
  std::vector<std::string> prompts;         // empty: a new line
  std::optional<std::string> prompts_file;  // one on each line
  int64_t tokens = 300;
  double temperature = 0.8;
  int64_t top_k = 0;  // 0: all
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 1337;
  std::vector<std::string> stop;  // texts
  bool ignore_end = false;
  std::string format = "text";
  Words words;  // of the plan
};

struct EvaluateOptions {
  std::string from;
  Words words;  // of the data and of the plan
};

struct DatasetOptions {
  std::vector<std::string> sources;
  std::optional<std::string> tokenizer;
  int64_t vocab = 50257;  // of a bpe tokenizer that is trained
  int64_t shard_tokens = 0;
  std::optional<std::string> out;
};

struct ReportOptions {
  std::vector<std::string> runs;  // run directories: one, or two to be compared; with a figure also none
  std::string format = "html";    // or "text", on standard output
  std::optional<std::string> figure, out;
  bool svg = false;
  Words words = {};  // of a plan that is drawn where there is no run
};

struct BenchOptions {
  std::string device = "cpu";
  std::vector<std::string> words;  // for Google Benchmark
};

// Throws Error (usage) for values that do not go together, naming the options. Single values were checked when set.
void validate(const TrainOptions& options);

}  // namespace tessera
