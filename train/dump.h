// A dumped step: what each layer gives, and the gradient of that, whole and in order whatever the plan, in one file,
// beside which another program's step can be laid. The names are those of transformers' modules:
//
//   input_ids, targets    int32 (B, T), the step's whole batch; a target of -1 is not trained
//   loss                  float64 (), the mean over the trained targets
//   NAME                  what the module of that name gives: (B, T, C), of lm_head (B, T, V)
//   NAME.grad             the gradient of the loss by it; both zero for padding
//
//   gpt2    transformer.wte; of each layer transformer.h.0.attn, transformer.h.0.mlp, transformer.h.0;
//           transformer.ln_f, lm_head
//   llama   model.embed_tokens; of each layer model.layers.0.self_attn, model.layers.0.mlp, model.layers.0; model.norm,
//           lm_head. Experts of a Mixtral are model.layers.0.block_sparse_moe
//
// No rank gathers anything: each writes what its passes make to its place in a file that all of them share, as
// checkpoints are written. Where ranks of tp have the same, the first writes it.
//
//   rows of the file      sequences of the micro-batch x tokens of cp (zig-zag or not) and of sp
//   columns of the file   all, or of lm_head those of the rank's part of the vocabulary
//
// Memory beside that of the step: logits, which are whole where a step makes them in blocks; of one tensor at a time a
// copy in the host's memory, where it is not there; and on rank 0 the batch's tokens.
#pragma once

#include <map>

#include "data/safetensors.h"
#include "models/decoder.h"
#include "train/trainer.h"

namespace tessera {

// Throws FieldError where step `step` of the job, counted from 1, cannot be dumped: ranks that make no step together,
// or a run of fewer steps. Step 0 is none.
void check_dump(const Job& job, int64_t step);

class StepDump {
 public:
  // For that step, into `folder`/dump_STEP.safetensors. Every rank makes one, before the step; the trainer must outlive
  // it. Throws what check_dump() throws, and FieldError for a model that is no Decoder.
  StepDump(Trainer& trainer, int64_t step, const std::filesystem::path& folder);
  bool is_next() const { return trainer_.steps_done() + 1 == step_; }
  // Before and after the passes of the step, on every rank. What does not come to an end leaves no file. Both throw
  // OutputError; finish() throws Error where anything of the file was not written.
  void begin(const Sequences& sequences);
  void finish(double loss);

 private:
  // The rank's part of what one module gives.
  struct Point {
    std::string name;
    std::span<const int64_t> tokens;  // of each sequence; none where another rank writes the same
    int64_t first, width;             // the first of its columns, of all
  };
  Var seen(Var made, const Point& point);
  // The sequences of a pass: the first, and their lengths where some are padded.
  struct PassRows {
    int64_t first = 0;
    std::vector<int64_t> lengths = {};
  };
  void write(const Point& point, const char* what, const Tensor& rows, const PassRows& at);
  void write(const std::string& name, int64_t at, std::span<const std::byte> bytes);

  Trainer& trainer_;
  int64_t step_;
  std::filesystem::path file_;
  Decoder* model_;
  std::vector<int64_t> tokens_;                      // of each sequence that are here, but for sp
  std::map<int64_t, std::vector<int64_t>> shorter_;  // the same of shorter sequences
  std::list<Point> points_;                          // in the order of a forward pass
  bool on_ = false;
  SafetensorsLayout layout_;
  std::unique_ptr<TemporaryName> half_written_;  // on rank 0
  std::optional<SharedFile> out_;
  int64_t missing_ = 0;  // on rank 0 bytes of the file's tensors; less those that were written
};

}  // namespace tessera
