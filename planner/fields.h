// The fields of descriptions by name: one list for files, JSON in, JSON out and pages.
#pragma once
#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "planner/files.h"
#include "planner/hardware.h"
#include "planner/software.h"
#include "tensor/error.h"

namespace tessera::planner {

inline constexpr std::array<std::string_view, 3> kTensorOverlapNames = {"none", "backward", "all"};

template <class H, class F>
void for_each_field_of_hardware(H& h, const F& f) {
  f("peak_flops", h.peak_flops), f("hbm_bytes_per_s", h.hbm_bytes_per_s), f("memory_bytes", h.memory_bytes);
  f("multiprocessors", h.multiprocessors), f("ranks_per_node", h.ranks_per_node);
  f("intra_bytes_per_s", h.intra_bytes_per_s), f("inter_bytes_per_s", h.inter_bytes_per_s);
  f("intra_latency_s", h.intra_latency_s), f("inter_latency_s", h.inter_latency_s), f("launch_s", h.launch_s);
  f("product_efficiency", h.product_efficiency), f("memory_efficiency", h.memory_efficiency);
  f("intra_efficiency", h.intra_efficiency), f("inter_efficiency", h.inter_efficiency);
  f("contention", h.contention), f("reserved_bytes", h.reserved_bytes);
  f("processors", h.processors), f("range_fastest", h.range_fastest), f("range_slowest", h.range_slowest);
}

template <class S, class F>
void for_each_field_of_software(S& s, const F& f) {
  f("attention", s.attention), f("fused_elementwise", s.fused_elementwise);
  f("parameter_bytes", s.parameter_bytes), f("gradient_bytes", s.gradient_bytes), f("state_bytes", s.state_bytes);
  f("gather_bytes", s.gather_bytes), f("reduce_bytes", s.reduce_bytes), f("logit_bytes", s.logit_bytes);
  f("tp_overlap", s.tp_overlap), f("dp_overlap", s.dp_overlap), f("pp_overlap", s.pp_overlap);
  f("scatter_messages", s.scatter_messages), f("dropout", s.dropout), f("fp8", s.fp8),
      f("reshard_after_forward", s.reshard_after_forward);
  f("fewer_layers_at_ends", s.fewer_layers_at_ends), f("gated_activation_pieces", s.gated_activation_pieces);
}

// Of one field from JSON. Throws FieldError that says what was expected and found.
void take(const char* name, const nlohmann::json& from, int64_t& to);
void take(const char* name, const nlohmann::json& from, double& to);
void take(const char* name, const nlohmann::json& from, bool& to);
void take(const char* name, const nlohmann::json& from, std::string& to);
void take(const char* name, const nlohmann::json& from, TensorOverlap& to);

// What a KEY = VALUE file says, as one JSON object. Throws Error with line and column.
nlohmann::json json_of_file(std::string_view text, const std::string& path);
// `base` is a name among `files`. Throws FieldError for unknown keys too.
Hardware hardware_from_json(const nlohmann::json& object);
Software software_from_json(const nlohmann::json& object);

}  // namespace tessera::planner
