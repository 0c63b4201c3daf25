// Plans that add the same parts of a step's batch in the same order, and so train to the same bits.
#pragma once
#include <string>
#include <vector>

namespace tessera::test {

using Plans = std::vector<std::string>;

// Two parts of a step's batch, added from left to right; of two numbers every order is the same.
inline const Plans kTwoParts = {"--ranks 2",
                                "--ranks 2 --zero 3",
                                "--ranks 1 --microbatches 2",
                                "--ranks 2 --dp-mode ps-sync --servers 2",
                                "--ranks 2 --zero 1",
                                "--ranks 2 --dp-mode dataparallel",
                                "--ranks 2 --zero 2 --all-reduce root",
                                "--ranks 2 --all-reduce ring --bucket-mb 0.001",
                                "--ranks 2 --dp-mode ps-sync --servers 1",
                                "--ranks 1 --microbatches 2 --zero 3 --recompute block"};
// ((g0 + g1) + g2) + g3.
inline const Plans kFourInARow = {"--ranks 4", "--ranks 4 --zero 3", "--ranks 1 --microbatches 4",
                                  "--ranks 4 --dp-mode ps-sync --servers 3", "--ranks 4 --dp-mode dataparallel"};
// (g0 + g1) + (g2 + g3): each rank its own first, or a tree of ranks.
inline const Plans kTwoPairs = {"--ranks 2 --microbatches 2", "--ranks 4 --all-reduce tree",
                                "--ranks 2 --microbatches 2 --zero 1", "--ranks 2 --microbatches 2 --dp-mode ps-sync"};

// In front of a plan when a run is resumed: nothing is left of the plan before.
inline const std::string kNoPlan =
    "--zero 0 --dp-mode ddp --servers 1 --all-reduce direct --bucket-mb 4 --microbatches 1 --recompute none ";

}  // namespace tessera::test
