// Which kernels compute a run's attention on a GPU: cuDNN's or our own (Plan::attention, Plan::deterministic).
#pragma once
#include <string>

#include "tensor/kernels.h"
#include "train/job.h"

namespace tessera {

// Whether cuDNN is to be asked: what the plan says, and otherwise wherever this program was built with cuDNN.
bool asks_cudnn(const Plan& plan);
KernelChoice kernels_of(const Plan& plan);
// Throws FieldError where the plan asks for cuDNN's kernels, and they are not there; or cannot serve this run: it never
// means our own in their place.
void check_attention(const Plan& plan);
void check_attention(const Job& job);
// For people, of a run on a GPU: whose kernels compute its attention, and why, in one line. Asks the GPU only where
// nothing else keeps cuDNN from serving it.
std::string describe_attention(const Job& job);

}  // namespace tessera
