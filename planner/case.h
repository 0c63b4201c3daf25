// Input of a prediction: model shape, layout, hardware and software.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/embedded_file.h"
#include "base/setting.h"
#include "models/language_model.h"
#include "train/plan.h"

namespace tessera::planner {

inline double real(int64_t x) { return static_cast<double>(x); }

struct Machine;

enum class Positions : uint8_t { learned, rope };

// Sizes of a decoder, whose layers and positions need not be those of a family of Tessera. Has no default sizes.
struct ModelShape : ModelConfig {
  ModelShape();
  // Throws FieldError for shared experts.
  explicit ModelShape(const ModelConfig& config);

  bool gated = false;  // SwiGLU
  Positions encoding = Positions::learned;

  int64_t key() const { return key_heads() * head_size(); }  // channels of k or v
  ModelConfig config() const;                                // GPT-2 or Llama
  int64_t learned() const { return encoding == Positions::rope ? 0 : position_rows(); }
};

// Parameters of a layer's feed-forward block or all its experts, of a layer's weight matrices, of a layer, and of the
// model.
double expert_parameters(const ModelShape& m);
double layer_matrices(const ModelShape& m);
double layer_parameters(const ModelShape& m);
double parameters(const ModelShape& m);
double active_parameters(const ModelShape& m);  // per token: only the experts to which it is routed

struct Layout {
  Plan plan = {};
  int64_t ep = 1;         // expert-parallel group size; the groups subdivide dp x cp
  int64_t sequences = 1;  // per micro-batch and data rank
  int64_t batch() const { return plan.dp * plan.microbatches * sequences; }  // sequences per step
  bool operator==(const Layout&) const = default;
};

// FLOP/s over s tokens: flops * s / (s + half_tokens).
struct AttentionThroughput {
  double flops = 0, half_tokens = 0;
  bool operator==(const AttentionThroughput&) const = default;
};

// From data sheets and public microbenchmarks cited in planner/hardware/NAME.toml, or measured on this machine.
struct Hardware {
  std::string name = {};
  double peak_flops = 0;  // dense matmuls in the training dtype
  double hbm_bytes_per_s = 0, memory_bytes = 0;
  int64_t multiprocessors = 0;
  int64_t ranks_per_node = 0;
  double intra_bytes_per_s = 0, inter_bytes_per_s = 0;      // per rank and direction, within and between nodes
  double intra_latency_s = 0, inter_latency_s = 0;          // per message
  double launch_s = 0;                                      // per kernel, or per call that blocks the device
  double product_efficiency = 0.85;                         // large matmuls: fraction of peak_flops
  double memory_efficiency = 0.85;                          // elementwise kernels: fraction of hbm_bytes_per_s
  double intra_efficiency = 0.78, inter_efficiency = 0.85;  // collectives: fraction of link bandwidth
  double contention = 0.15;  // slowdown of compute, as a fraction of overlapped communication time
  std::map<std::string, AttentionThroughput> attention = {};  // key: unfused, flash1, flash2, cudnn, ...
  double reserved_bytes = 0;                                  // part of memory_bytes for driver and libraries
  int64_t cores = 0;                                          // CPU cores shared by a node's ranks; 0: not shared
  double range_fastest = 1, range_slowest = 1;                // factors of the predicted time; 1 for a measured machine
  std::shared_ptr<const Machine> measured = {};               // predicts Tessera's own steps
  bool operator==(const Hardware&) const = default;
  double usable_bytes() const { return memory_bytes - reserved_bytes; }
};

enum class TensorOverlap : uint8_t { none, backward, all };  // overlap of tp collectives with matmuls
// Whether ZeRO-3 reshards parameters after forward and gathers them again for backward; automatic: it does unless pp >
// 1.
enum class Reshard : uint8_t { always, never, automatic };

// A framework's storage, communication and overlap, according to its documentation.
struct Software {
  std::string name = "tessera";
  std::string attention = "flash2";  // key of Hardware::attention
  bool fused_elementwise = true;     // bias + GELU, dropout + residual
  double parameter_bytes = 2;        // per parameter, as read by passes
  double gradient_bytes = 4;         // per parameter
  double state_bytes = 12;           // per parameter: master copy and two moments
  double gather_bytes = 2;           // per parameter, over the data axis
  double reduce_bytes = 4;           // per gradient element, over the data axis
  double logit_bytes = 4;            // in the loss, per token and vocabulary entry
  TensorOverlap tp_overlap = TensorOverlap::none;
  bool dp_overlap = true, pp_overlap = true;
  bool scatter_messages = false;  // each tp rank sends only its slice to the next stage
  bool dropout = false;           // masks are saved for backward
  bool fp8 = false;               // layer matmuls at twice the peak
  Reshard reshard_after_forward = Reshard::always;
  bool sums_after_pipeline = false;    // with pp, unsharded gradients until the last micro-batch
  bool message_buffers = false;        // receive buffers per micro-batch of a stage
  bool fewer_layers_at_ends = false;   // one layer fewer in the first and last stages
  double gated_activation_pieces = 3;  // arrays of `ffn` channels saved by a gated layer
  bool operator==(const Software&) const = default;
};

struct Case {
  ModelShape model = {};
  Layout layout = {};
  Hardware hardware = {};
  Software software = {};
};

// A layout has the plan fields that predictions support; attention rates have no descriptor (planner/case_json.h).
Settings field_descriptors(ModelShape& model);
Settings field_descriptors(Layout& layout);
Settings field_descriptors(Hardware& hardware);
Settings field_descriptors(Software& software);

// Resolves unset fields. Throws FieldError (field, expected, actual) for an invalid case.
Case checked_case(const Case& c);

void check(const Hardware& hardware);
void check(const Software& software);

// Embedded from planner/hardware/ and planner/software/, sorted by name.
const std::vector<EmbeddedFile>& hardware_files();
const std::vector<EmbeddedFile>& software_files();

// "a100-40", "a100-80", ...; "deepspeed", "fsdp", "megatron", "tessera".
const std::vector<std::string>& hardware_names();
const std::vector<std::string>& software_names();
// Throws FieldError listing the valid names.
Hardware hardware_named(std::string_view name);
Software software_named(std::string_view name);
// From KEY = VALUE lines; `path` is used in errors. Missing keys default to the description named by `base`, otherwise
// to the defaults above. Throws FieldError, also for unknown keys.
Hardware hardware_from_file(std::string_view text, const std::string& path);
Software software_from_file(std::string_view text, const std::string& path);

}  // namespace tessera::planner
