// A case: all that a prediction is asked about. A model by its sizes, a layout, hardware and software by their numbers.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "models/language_model.h"
#include "settings/setting.h"
#include "train/plan.h"

namespace tessera::planner {

inline double real(int64_t x) { return static_cast<double>(x); }

struct Machine;

enum class Positions : uint8_t { learned, rope };

struct ModelShape {
  int64_t layers = 0, channels = 0, heads = 0;
  int64_t kv_heads = 0;  // 0: as many as heads
  int64_t head_dim = 0;  // 0: channels / heads
  int64_t ffn = 0;       // hidden channels of a feed-forward layer, or of an expert; 0: 4 channels
  int64_t experts = 0, experts_per_token = 0;
  bool gated = false;  // SwiGLU: three matrices instead of two
  int64_t vocab = 0, context = 0;
  int64_t window = 0;  // last tokens that one attends to; 0: all
  bool tied = true;
  Positions positions = Positions::learned;
  int64_t position_rows = 0;  // of learned ones; 0: as many as the context
  bool qkv_bias = false, proj_bias = false, mlp_bias = false,
       qk_norm = false;  // of the llama family, as in ModelConfig
  bool operator==(const ModelShape&) const = default;

  int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t head_size() const { return head_dim > 0 ? head_dim : channels / heads; }
  int64_t query() const { return heads * head_size(); }      // channels of q, and of what attention gives
  int64_t key() const { return key_heads() * head_size(); }  // channels of k, and of v
  int64_t hidden() const { return ffn > 0 ? ffn : 4 * channels; }
  // Rows of the table of positions, where there is one.
  int64_t learned() const { return positions == Positions::rope ? 0 : position_rows > 0 ? position_rows : context; }
  double keys() const { return visible_keys(context, window); }  // twice those that a query sees
};

// Throws FieldError for shared experts, which predictions do not know.
ModelShape to_model_shape(const ModelConfig& config);
// The way back: GPT-2 or Llama of these sizes, without dropout.
ModelConfig to_model_config(const ModelShape& shape);

// Parameters: of the feed-forward layer, or of all experts; of all that a layer multiplies with; of a layer; of all.
double expert_parameters(const ModelShape& m);
double layer_matrices(const ModelShape& m);
double layer_parameters(const ModelShape& m);
double parameters(const ModelShape& m);
double active_parameters(const ModelShape& m);  // those that a token meets: of its experts alone

struct Layout {
  Plan plan = {};
  int64_t ep = 1;         // ranks that share out experts, cut out of dp x cp
  int64_t sequences = 1;  // one micro-batch's, on one data rank
  int64_t batch() const { return plan.dp * plan.microbatches * sequences; }  // sequences of a step
  bool operator==(const Layout&) const = default;
};

// Attention over s tokens runs at `flops` s / (s + half_tokens).
struct AttentionRate {
  double flops = 0, half_tokens = 0;
  bool operator==(const AttentionRate&) const = default;
};

// Numbers of data sheets and of public microbenchmarks, each with its source in planner/hardware/NAME.toml, or measured
// on this machine.
struct Hardware {
  std::string name = {};
  double peak_flops = 0;  // FLOP/s of dense products of the training dtype
  double hbm_bytes_per_s = 0, memory_bytes = 0;
  int64_t multiprocessors = 0;  // that share the tiles of a product
  int64_t ranks_per_node = 0;
  double intra_bytes_per_s = 0, inter_bytes_per_s = 0;  // a rank's, in one direction, within a node and between nodes
  double intra_latency_s = 0, inter_latency_s = 0;      // a message's
  double launch_s = 0;                                  // a kernel's, or a call's, where the device waits for it
  double product_efficiency = 0.85;                     // share of peak_flops that long products reach
  double memory_efficiency = 0.85;                      // share of hbm_bytes_per_s that elementwise kernels reach
  double intra_efficiency = 0.78, inter_efficiency = 0.85;  // shares of the links' rates that collectives reach
  double contention = 0.15;  // share of hidden communication's time by which the compute beside it takes longer
  std::map<std::string, AttentionRate> attention = {};  // by kernel: unfused, flash1, flash2, cudnn, ...
  double reserved_bytes = 0;                            // the driver's and the libraries', out of memory_bytes
  int64_t processors = 0;                               // that the ranks of a node share; 0: each has its own
  double range_fastest = 1, range_slowest = 1;          // times a predicted time; both 1: measured here
  std::shared_ptr<const Machine> measured = {};         // by whose figures Tessera's own steps are predicted
  bool operator==(const Hardware&) const = default;
  double usable_bytes() const { return memory_bytes - reserved_bytes; }
};

enum class TensorOverlap : uint8_t { none, backward, all };  // which collectives of tp go on beside products
// Whether ZeRO-3 frees parameters after the forward pass and gathers them again; automatic: but for a pipeline.
enum class Reshard : uint8_t { always, never, automatic };

// A program's ways: what it keeps, sends and hides. Tessera itself, or another by what its documents say.
struct Software {
  std::string name = "tessera";
  std::string attention = "flash2";  // the kernel, by its name in Hardware
  bool fused_elementwise = true;     // bias and GELU in one pass, dropout and residual in another
  double parameter_bytes = 2;        // for a parameter that passes read,
  double gradient_bytes = 4;         // for its gradient,
  double state_bytes = 12;           // and for the optimizer's: master copy and two moments
  double gather_bytes = 2;           // for a parameter that ranks of the data axis send,
  double reduce_bytes = 4;           // and for a gradient
  double logit_bytes = 4;            // that the loss holds for a token and an entry of the vocabulary
  TensorOverlap tp_overlap = TensorOverlap::none;
  bool dp_overlap = true, pp_overlap = true;
  bool scatter_messages = false;  // each rank of tp sends its part of what goes to the next stage
  bool dropout = false;           // its masks are kept
  bool fp8 = false;               // products of layers, at twice the peak
  Reshard reshard_after_forward = Reshard::always;
  bool sums_after_pipeline = false;    // gradients stay whole until the last micro-batch of a pipeline
  bool message_buffers = false;        // each micro-batch has buffers of its own for what a stage receives
  bool fewer_layers_at_ends = false;   // the first and the last stage have a layer less
  double gated_activation_pieces = 3;  // arrays of `ffn` channels that a gated feed-forward layer keeps
  bool operator==(const Software&) const = default;
};

struct Case {
  ModelShape model = {};
  Layout layout = {};
  Hardware hardware = {};
  Software software = {};
};

// The entries of their fields: names, ranges, choices. Those of a layout are its plan's own as far as predictions know
// them; a kernel's rate of attention has no entry, but a key (planner/case_json.h).
Settings field_descriptors(ModelShape& model);
Settings field_descriptors(Layout& layout);
Settings field_descriptors(Hardware& hardware);
Settings field_descriptors(Software& software);

// The case with what it leaves to choice chosen. Throws FieldError that names the field, what was expected and found.
Case checked_case(const Case& c);

// Throws FieldError for rates, sizes and times that cannot be.
void check(const Hardware& hardware);
void check(const Software& software);

// The descriptions that the program carries with it: planner/hardware/*.toml and planner/software/*.toml, as they are
// there, in the order of names.
struct File {
  std::string_view name, text;  // the name without .toml
};
const std::vector<File>& hardware_files();
const std::vector<File>& software_files();

// "a100-40", "a100-80", ...; "deepspeed", "fsdp", "megatron", "tessera".
const std::vector<std::string>& hardware_names();
const std::vector<std::string>& software_names();
// Throws FieldError that lists the names.
Hardware hardware_named(std::string_view name);
Software software_named(std::string_view name);
// A description from a file of KEY = VALUE lines that `path` names; what it does not say is as `base` in it says, or as
// above. Throws FieldError for unknown keys too.
Hardware hardware_from_file(std::string_view text, const std::string& path);
Software software_from_file(std::string_view text, const std::string& path);

}  // namespace tessera::planner
