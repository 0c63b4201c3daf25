// Dump of one step: the output of every layer and its gradient, unsharded and in order under any plan, for comparison
// with other programs. Names follow the modules of transformers:
//
//   input_ids, targets    int32 (B, T), the step's global batch; untrained targets are -1
//   loss                  float64 (), the mean over the trained targets
//   NAME                  the output of that module: (B, T, C); for lm_head (B, T, V)
//   NAME.grad             the gradient of the loss with respect to NAME; both are zero for padding
//   PARAM                 the parameter of that name before the step, in its published shape; PARAM.exp_avg,
//                         PARAM.exp_avg_sq, PARAM.momentum_buffer: its optimizer state
//   PARAM.grad            its gradient after the last reduction, before clipping; PARAM.updated: its value after the
//   step grad_norm, lr         float64 (), of the step
//
//   gpt2    transformer.wte; per layer transformer.h.0.attn, transformer.h.0.mlp, transformer.h.0;
//           transformer.ln_f, lm_head
//   llama   model.embed_tokens; per layer model.layers.0.self_attn, model.layers.0.mlp, model.layers.0; model.norm,
//           lm_head. Experts of a Mixtral are model.layers.0.block_sparse_moe
//
// The metadata `info` has the optimizer's settings (docs/audit.md). Parameters of models without published names are
// omitted, and so are adapters and quantized weights. If loss or norm is not finite, PARAM.updated is PARAM.
//
// Nothing is gathered: each rank writes its slices to a shared file; the first tp rank writes values replicated over
// tp.
//
//   rows of the file      sequences of the micro-batch x tokens of cp (zig-zag or not) and of sp
//   columns of the file   all; for lm_head the rank's shard of the vocabulary
//
// Additional memory: the full logits, even if the step computes them in blocks; a host copy of one device tensor at a
// time; on rank 0 the batch's tokens; a rank's slice of one transposed parameter.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "models/decoder.h"
#include "models/hub_tensors.h"
#include "train/batches.h"
#include "train/checkpoint/full_state.h"
#include "train/state.h"

namespace tessera {

// Throws FieldError if step `step` of the job (from 1; 0: no dump) cannot be dumped, because ranks run no synchronized
// steps or the run ends before that step.
void check_dump(const TrainConfig& job, int64_t step);

class StepDump {
 public:
  // Dumps the step to `directory`/dump_STEP.safetensors. Every rank constructs one before the step; the state must
  // outlive it. Throws as check_dump() does, and FieldError if the model is not a Decoder.
  StepDump(TrainState& train, int64_t step, const std::filesystem::path& directory);
  bool is_next() const { return train_.steps_done() + 1 == step_; }
  // Called before and after the passes of the step and after its update, on every rank. An aborted dump leaves no file.
  // All throw OutputError; finish() throws Error if the file is incomplete.
  void begin(const Sequences& sequences);
  void write_gradients(const StepReport& report);
  bool awaits_update() const { return out_.has_value(); }
  void finish();

 private:
  struct Point {
    std::string name;
    std::span<const int64_t> tokens;  // local tokens of each sequence; empty if another rank writes the same values
    int64_t first, width;             // first column; number of all columns
  };
  Var seen(Var made, const Point& point);
  // `lengths` only if some sequences are padded.
  struct PassRows {
    int64_t first = 0;
    std::vector<int64_t> lengths = {};
  };
  void write(const Point& point, const char* what, const Tensor& rows, const PassRows& at);
  void write(const std::string& name, int64_t at, std::span<const std::byte> bytes);
  // Slices of parameters, as `what` of their published tensors: "", ".grad", ".updated".
  void write(const std::vector<TensorSlice>& slices, const std::string& what, DType dtype);
  void write(const HubTensor& tensor, const std::string& what, const TensorSlice& slice, const Tensor& values);
  void find_parameters();
  std::vector<TensorBytes> list_parameters() const;
  std::string info() const;

  TrainState& train_;
  int64_t step_;
  std::filesystem::path file_;
  Decoder* model_;
  std::vector<int64_t> tokens_;                      // local tokens of each sequence before sp partitions them
  std::map<int64_t, std::vector<int64_t>> shorter_;  // the same for shorter sequences, by length
  std::list<Point> points_;
  std::vector<HubTensor> parameters_;
  std::set<std::string> trained_, decayed_;  // of their names
  bool on_ = false;
  SafetensorsLayout layout_;
  std::unique_ptr<TemporaryName> half_written_;  // on rank 0
  std::optional<SharedFile> out_;
  int64_t missing_ = 0;  // on rank 0: bytes of the file's tensors minus bytes written
};

}  // namespace tessera
