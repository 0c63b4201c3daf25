// The meaning of the options, and one line for plans that cannot be.
#include <gtest/gtest.h>

#include <numeric>

#include "app/job_of.h"
#include "models/decoder.h"
#include "models/layout.h"

namespace tessera {
namespace {

using Change = std::function<void(TrainOptions&)>;

TrainOptions with(const Change& change) {
  TrainOptions o;
  o["backend"] = "threads";
  change(o);
  return o;
}

TEST(Axes, WhatIsNotGivenFollowsFromTheRanks) {
  using Axes = std::array<int64_t, 4>;
  const auto axes = [](const Change& change) {
    const Plan p = job_of(with(change)).plan;
    return Axes{p.pp, p.dp, p.cp, p.tp};
  };
  EXPECT_EQ(axes([](TrainOptions& o) { o["tp"] = 2; }), (Axes{1, 1, 1, 2}));
  EXPECT_EQ(axes([](TrainOptions& o) { o.ranks = 8, o["tp"] = 2; }), (Axes{1, 4, 1, 2}));
  EXPECT_EQ(axes([](TrainOptions& o) { o.ranks = 8, o["pp"] = 2, o["tp"] = 2; }), (Axes{2, 2, 1, 2}));
  EXPECT_EQ(axes([](TrainOptions& o) { o.ranks = 8, o["dp"] = 2, o["tp"] = 2, o["cp"] = 1; }), (Axes{2, 2, 1, 2}));
  EXPECT_EQ(axes([](TrainOptions& o) { o.ranks = 6, o["dp"] = 1, o["pp"] = 1, o["tp"] = 2; }), (Axes{1, 1, 3, 2}));
  EXPECT_EQ(axes([](TrainOptions& o) { o.ranks = 3; }), (Axes{1, 3, 1, 1}));
}

TEST(Plan, OneLineForWhatCannotBe) {
  const auto expect = [](const Change& change, const std::string& words) {
    try {
      check_plan(with(change));
      ADD_FAILURE() << "accepted; expected: " << words;
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::usage);
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  expect([](TrainOptions& o) { o["tp"] = 3; }, "--tp: 3 does not divide the 4 heads; the nearest that does: 2 or 4");
  expect([](TrainOptions& o) { o.ranks = 8, o["tp"] = 3; },
         "makes 3 ranks; expected 8; the nearest that can: 6 or 9 ranks");
  expect([](TrainOptions& o) { o["pp"] = 8; }, "--pp: 8 ranks make 8 stages, more than the 4 layers");
  expect([](TrainOptions& o) { o["pp"] = 4, o["schedule"] = "zb-v"; }, "4 ranks make 8 stages, more than the 4 layers");
  expect([](TrainOptions& o) { o["pp"] = 2, o["microbatches"] = 3, o["schedule"] = "interleaved"; }, "3 micro-batches");
  expect([](TrainOptions& o) { o["cp"] = 3; },
         "cut a context of 64 into 6 parts; the nearest --context that can be cut: 60 or 66");
  expect([](TrainOptions& o) { o["cp"] = 8, o["cp_mode"] = "ulysses"; }, "do not divide the 4 heads that each has");
  expect([](TrainOptions& o) { o["tp"] = 4, o["cp"] = 2, o["cp_mode"] = "ulysses"; },
         "do not divide the 1 heads that each has");
  expect([](TrainOptions& o) { o["tp"] = 2, o["sp"] = true, o["context"] = 7; },
         "--sp: 2 ranks of --tp do not divide the 7 tokens");
  expect([](TrainOptions& o) { o["backend"] = "nccl"; },
         "--backend: nccl is for ranks on GPUs; expected --device cuda");
  expect([](TrainOptions& o) { o["backend"] = "nccl", o["dp_mode"] = "ps-sync"; },
         "--backend: ps-sync adds at one rank, in rank order, and nccl does not; expected threads or mpi");
  expect([](TrainOptions& o) { o["all_reduce"] = "native"; },
         "--all-reduce: thread ranks have no library of their own");
  expect([](TrainOptions& o) { o["tp"] = 2, o["dp_mode"] = "ps-sync"; },
         "--dp-mode: ps-sync is for data-parallel ranks alone");
  expect([](TrainOptions& o) { o["pp"] = 2, o["dp_mode"] = "ps-async"; },
         "--dp-mode: ps-async is for data-parallel ranks alone");
  expect([](TrainOptions& o) { o["pp"] = 2, o["schedule"] = "foo"; }, "--schedule: there is none named 'foo'");
  expect([](TrainOptions& o) { o["chunks"] = 3; }, "--chunks: goes with --schedule interleaved, found 1f1b");
  expect([](TrainOptions& o) { o["dp"] = 5; }, "12 sequences cannot be cut evenly into 5 data ranks");
  expect([](TrainOptions& o) { o["tp"] = 4, o["vocab"] = 3; },
         "--tp: a vocabulary of 3 has no row for each of 4 ranks");
}

// GPT-2's head costs as much as five of its blocks.
TEST(SplitLayers, TheLastStagePaysForTheHead) {
  Decoder gpt2({.layers = 12, .heads = 12, .channels = 768, .context = 1024, .vocab = 50304});
  const std::vector<Range> stages = split_layers(gpt2, 4);
  std::vector<int64_t> sizes;
  for (const Range& r : stages) sizes.push_back(r.size());
  EXPECT_EQ(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), 12);
  EXPECT_EQ(sizes.back(), 1);
  EXPECT_EQ(*std::max_element(sizes.begin(), sizes.end()), 4);
  Decoder small({.layers = 8, .channels = 64, .context = 16, .vocab = 8});
  const std::vector<Range> even = split_layers(small, 4);
  for (size_t s = 0; s < 4; ++s) EXPECT_EQ(even[s].size(), 2);
  EXPECT_THROW(split_layers(gpt2, 13), Error);
}

TEST(SplitLayers, UnitsLieInTheStageOfTheirLayer) {
  const std::vector<Range> layers = {{0, 2}, {2, 3}, {3, 12}};
  Decoder model({.layers = 12, .heads = 1, .channels = 4, .context = 4, .vocab = 4, .tie_copies = true});
  std::map<std::string, int> stages;
  const std::vector<Module::Unit> units = model.layout();
  const std::vector<int> of_units = stages_of_units(model, layers);
  for (size_t u = 0; u < units.size(); ++u) stages[units[u].name] = of_units[u];
  EXPECT_EQ(stages.size(), 16U);
  EXPECT_EQ(stages.at("tokens"), 0);
  EXPECT_EQ(stages.at("positions"), 0);
  EXPECT_EQ(stages.at("blocks.1"), 0);
  EXPECT_EQ(stages.at("blocks.2"), 1);
  EXPECT_EQ(stages.at("blocks.11"), 2);
  EXPECT_EQ(stages.at("norm"), 2);
  EXPECT_EQ(stages.at("head"), 2);
}

}  // namespace
}  // namespace tessera
