// The library in one include: what a program on Tessera is made of. docs/library.md goes through four of them.
//
//   #include <tessera/tessera.h>
//
// What these headers declare is meant to be used; other headers of the library serve them, and may change without a
// word.
#pragma once

// Tensors, their gradients, and random numbers that do not depend on how the work is divided.
#include "autograd/ops.h"
#include "tensor/random.h"
#include "tensor/tensor.h"

// Layers, losses and optimizers.
#include "nn/layers.h"
#include "optim/grad_norm.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer.h"

// Ranks, what they do together, and the ways to divide the work among them.
#include "parallel/comm/launch.h"
#include "parallel/context_parallel.h"
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

// Training under a plan, and the proof that it is the run of one rank.
#include "train/plan.h"
#include "train/trainer.h"
#include "verify/verify.h"

// Text, tokens and files.
#include "data/dataset.h"
#include "data/safetensors.h"
#include "data/text.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
