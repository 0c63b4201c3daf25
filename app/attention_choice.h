// Which kernels compute a run's attention on a GPU: cuDNN's or our own (--attention, --deterministic).
#pragma once
#include <string>

#include "app/options.h"

namespace tessera {

// Whether cuDNN is to be asked: what --attention says, and without it wherever this program was built with cuDNN.
bool asks_cudnn(const TrainOptions& options);
// Throws Error (usage) in one line where --attention names kernels that are not there.
void check_attention(const TrainOptions& options);
// Makes this the choice of the arenas that rank_arena() makes from now on; before that, kernels are our own.
void choose_kernels(const TrainOptions& options);
// For people, of a run on a GPU: whose kernels compute its attention, and why, in one line. Asks the GPU only where
// nothing else keeps cuDNN from serving it.
std::string describe_attention(const TrainOptions& options);

}  // namespace tessera
