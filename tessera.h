// The complete public API in one header. docs/library.md presents five example programs.
//
//   #include <tessera/tessera.h>
//
// Other headers of the library are internal and may change without notice.
#pragma once

// Tensors, gradients, and random numbers that are independent of the partitioning.
#include "autograd/ops.h"
#include "tensor/random.h"
#include "tensor/tensor.h"

// Layers, losses and optimizers.
#include "nn/layers.h"
#include "optim/grad_norm.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer.h"

// Ranks, communication, and parallelization strategies.
#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
#include "parallel/data_step.h"
#include "parallel/data_strategy.h"
#include "parallel/gradient_norm.h"
#include "parallel/mesh.h"
#include "parallel/pipeline/runtime.h"
#include "parallel/pipeline/schedules.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "parallel/placement.h"
#include "parallel/tensor_parallel.h"

// Models.
#include "models/decoder.h"
#include "models/language_model.h"
#include "models/layout.h"
#include "models/sample.h"
#include "models/stages.h"

// Training under a plan, runs with checkpoints and metrics, and verification against one rank.
#include "train/check.h"
#include "train/config.h"
#include "train/plan.h"
#include "train/run/run.h"
#include "train/run/signals.h"
#include "train/trainer.h"
#include "verify/verify.h"

// Text, tokens and files.
#include "data/dataset.h"
#include "data/loader.h"
#include "data/safetensors.h"
#include "data/text.h"
#include "data/tokenizer.h"
