// Plans that add the same parts of a step's batch in the same order, and so train to the same bits.
#pragma once
#include <string>
#include <vector>

namespace tessera::test {

using Plans = std::vector<std::string>;

// Two parts of a step's batch, added from left to right; of two numbers every order is the same.
inline const Plans kTwoParts({"--ranks 2", "--ranks 2 --zero 3", "--ranks 1 --microbatches 2",
                              "--ranks 2 --dp-mode ps-sync --servers 2", "--ranks 2 --zero 1",
                              "--ranks 2 --dp-mode dataparallel", "--ranks 2 --zero 2 --all-reduce root",
                              "--ranks 2 --all-reduce ring --bucket-mb 0.001",
                              "--ranks 2 --dp-mode ps-sync --servers 1",
                              "--ranks 1 --microbatches 2 --zero 3 --recompute block"});
// ((g0 + g1) + g2) + g3.
inline const Plans kFourInARow = {"--ranks 4", "--ranks 4 --zero 3", "--ranks 1 --microbatches 4",
                                  "--ranks 4 --dp-mode ps-sync --servers 3", "--ranks 4 --dp-mode dataparallel"};
// (g0 + g1) + (g2 + g3): each rank its own first, or a tree of ranks.
inline const Plans kTwoPairs = {"--ranks 2 --microbatches 2", "--ranks 4 --all-reduce tree",
                                "--ranks 2 --microbatches 2 --zero 1", "--ranks 2 --microbatches 2 --dp-mode ps-sync"};

// The whole batch at once: of a tied weight's two uses every order is the same.
inline const Plans kOnePart = {"--ranks 1", "--ranks 2 --pp 2", "--ranks 2 --pp 2 --schedule zb-h2 --zero 3",
                               "--ranks 2 --pp 2 --schedule naive"};
// Two micro-batches through two stages or more: each use of the tied weight has a sum of its own.
inline const Plans kPipelines = {
    "--ranks 2 --pp 2 --microbatches 2", "--pp 2 --microbatches 2 --schedule gpipe --recompute block",
    "--ranks 2 --pp 2 --microbatches 2 --schedule zb-h1 --zero 3",
    "--ranks 1 --pp 1 --microbatches 2 --schedule interleaved", "--ranks 2 --pp 2 --microbatches 2 --schedule zb-v"};
// Layouts of every kind, to read a checkpoint into and to write it from.
inline const Plans kLayouts({"--ranks 2 --tp 2", "--ranks 4 --tp 2 --sp --zero 3", "--ranks 2 --cp 2 --zero 1",
                             "--ranks 8 --pp 2 --tp 2 --zero 2", "--ranks 4 --pp 2 --schedule v-min --tp 2",
                             "--ranks 8 --pp 2 --cp 2 --tp 2 --cp-mode ulysses", "--ranks 8 --pp 4 --zero 3"});

// In front of a plan when a run is resumed: nothing is left of the plan before.
inline const std::string kNoPlan =
    "--zero 0 --dp-mode ddp --servers 1 --staleness 1 --all-reduce direct --bucket-mb 4 --microbatches 1 --recompute "
    "none --pp 1 --cp 1 --tp 1 --sp=false --schedule 1f1b --cp-mode ring ";

}  // namespace tessera::test
