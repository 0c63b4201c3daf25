// What a program keeps, sends and hides: Tessera itself, or another by what its documents say.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::planner {

enum class TensorOverlap : uint8_t { none, backward, all };  // which collectives of tp go on beside products

struct Software {
  std::string name = "tessera";
  std::string attention = "flash2";  // the kernel, by its name in Hardware
  bool fused_elementwise = true;     // bias and GELU in one pass, dropout and residual in another
  double parameter_bytes = 2;        // of a parameter that passes read,
  double gradient_bytes = 4;         // of its gradient,
  double state_bytes = 12;           // and of the optimizer's: master copy and two moments
  double gather_bytes = 2;           // of a parameter that ranks of the data axis send,
  double reduce_bytes = 4;           // and of a gradient
  double logit_bytes = 4;            // that the loss holds for a token and an entry of the vocabulary
  TensorOverlap tp_overlap = TensorOverlap::none;
  bool dp_overlap = true, pp_overlap = true;
  bool scatter_messages = false;       // each rank of tp sends its part of what goes to the next stage
  bool dropout = false;                // its masks are kept
  bool fp8 = false;                    // products of layers, at twice the peak
  bool reshard_after_forward = true;   // ZeRO-3 gathers again for the backward pass
  bool fewer_layers_at_ends = false;   // the first and the last stage have a layer less
  double gated_activation_pieces = 3;  // arrays of `ffn` channels that a gated feed-forward layer keeps
  bool operator==(const Software&) const = default;
};

// "deepspeed", "fsdp", "megatron", "tessera".
const std::vector<std::string>& software_names();
// Throws FieldError that lists the names.
Software software_named(std::string_view name);
Software software_from_file(std::string_view text, const std::string& path);
void check(const Software& software);

}  // namespace tessera::planner
