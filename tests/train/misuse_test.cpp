// Misuse of the library is reported at the call by an exception.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/launch.h"
#include "parallel/data_strategy.h"
#include "tests/support/strategy.h"
#include "tests/train/support.h"
#include "train/check.h"
#include "train/trainer.h"

namespace tessera {
namespace {

// The message of the Error that f throws.
std::string message_from(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TrainConfig small_job() {
  return {.model = {.layers = 1, .heads = 1, .channels = 8, .context = 4, .vocab = 16},
          .optim = {.steps = 1, .batch = 2}};
}

TEST(Misuse, NullObjectsAreReportedWithArgumentName) {
  const std::string null = ": expected an object, got null";
  EXPECT_EQ(message_from([] { Tensor::zeros({2}, DType::float32, nullptr); }), "[empty] arena" + null);
  EXPECT_EQ(message_from([] { Communicator(nullptr, "dp"); }), "[communicator] transport" + null);
  EXPECT_EQ(message_from([] { launch({.ranks = 2}, nullptr); }),
            "`body`: expected a callable, got an empty std::function");
  for (const int ranks : {1, 2})
    for (const int zero : {0, 1, 3}) {
      std::vector<std::string> found(static_cast<size_t>(ranks));
      launch({.ranks = ranks}, [&](Communicator& world) {
        const std::unique_ptr<LanguageModel> model = make_model(small_job().model);
        found[static_cast<size_t>(world.rank())] =
            message_from([&] { make_data_strategy(*model, world, nullptr, {.strategy = test::zero_options(zero)}); });
      });
      for (const std::string& message : found) EXPECT_EQ(message, "[data parallel] arena" + null) << zero;
    }
}

// A null pointer dereferenced in an argument of a strategy. Clang's builds here have sanitizers, which report the
// dereference itself.
#ifndef __clang__
TEST(Misuse, NullModelIsReportedByEveryStrategy) {
  for (const DataMode mode : {DataMode::ddp, DataMode::dataparallel, DataMode::diloco, DataMode::ps_sync})
    for (const int zero : {0, 1, 2, 3}) {
      if (zero > 0 && mode != DataMode::ddp) continue;
      launch({.ranks = 2}, [&](Communicator& world) {
        const std::unique_ptr<LanguageModel> model;
        const LanguageModel* volatile hidden = model.get();  // opaque to the compiler
        EXPECT_EQ(message_from([&] {
                    make_data_strategy(*const_cast<LanguageModel*>(hidden), world, make_arena(),
                                       {.strategy = test::strategy_options(mode, zero)});
                  }),
                  "[data parallel] model: expected an object, got null");
      });
    }
}

#endif

TEST(Misuse, RejectsEmptyModelFactory) {
  TrainConfig job = small_job();
  job.make = nullptr;
  EXPECT_EQ(message_from([&] { check(job); }),
            "[model] make: expected a callable that returns a model, got an empty std::function");
  job.make = [](const ModelConfig&) { return std::unique_ptr<LanguageModel>(); };
  EXPECT_EQ(message_from([&] { check(job); }), "[model] make: its result: expected an object, got null");
}

}  // namespace
}  // namespace tessera
