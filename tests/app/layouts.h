// Plans that add the same parts of a batch in the same order, so that their results are bitwise identical.
#pragma once
#include <string>
#include <vector>

namespace tessera::test {

using Plans = std::vector<std::string>;

// Two parts of a batch; the sum of two values does not depend on their order.
inline const Plans kTwoParts({"--ranks 2", "--ranks 2 --zero 3", "--ranks 1 --microbatches 2",
                              "--ranks 2 --dp-mode ps-sync --servers 2", "--ranks 2 --zero 1",
                              "--ranks 2 --dp-mode dataparallel", "--ranks 2 --zero 2 --all-reduce root",
                              "--ranks 2 --all-reduce ring --bucket-mb 0.001",
                              "--ranks 2 --dp-mode ps-sync --servers 1",
                              "--ranks 1 --microbatches 2 --zero 3 --recompute block"});
// ((g0 + g1) + g2) + g3.
inline const Plans kFourInARow = {"--ranks 4", "--ranks 4 --zero 3", "--ranks 1 --microbatches 4",
                                  "--ranks 4 --dp-mode ps-sync --servers 3", "--ranks 4 --dp-mode dataparallel"};
// (g0 + g1) + (g2 + g3): each rank accumulates first, or a tree of ranks.
inline const Plans kTwoPairs = {"--ranks 2 --microbatches 2", "--ranks 4 --all-reduce tree",
                                "--ranks 2 --microbatches 2 --zero 1", "--ranks 2 --microbatches 2 --dp-mode ps-sync"};

// The full batch at once: the sum of a tied weight's two uses does not depend on their order.
inline const Plans kOnePart = {"--ranks 1", "--ranks 2 --pp 2", "--ranks 2 --pp 2 --schedule zb-h2 --zero 3",
                               "--ranks 2 --pp 2 --schedule naive"};
// Two micro-batches in two or more pipeline stages: each use of the tied weight is accumulated separately.
inline const Plans kPipelines = {
    "--ranks 2 --pp 2 --microbatches 2", "--pp 2 --microbatches 2 --schedule gpipe --recompute block",
    "--ranks 2 --pp 2 --microbatches 2 --schedule zb-h1 --zero 3",
    "--ranks 1 --pp 1 --microbatches 2 --schedule interleaved", "--ranks 2 --pp 2 --microbatches 2 --schedule zb-v"};
// Layouts of every kind, for reading and writing a checkpoint.
inline const Plans kLayouts({"--ranks 2 --tp 2", "--ranks 4 --tp 2 --sp --zero 3", "--ranks 2 --cp 2 --zero 1",
                             "--ranks 8 --pp 2 --tp 2 --zero 2", "--ranks 4 --pp 2 --schedule v-min --tp 2",
                             "--ranks 8 --pp 2 --cp 2 --tp 2 --cp-mode ulysses", "--ranks 8 --pp 4 --zero 3"});

// Precedes a plan on resume: resets all options of the previous plan.
inline const std::string kNoPlan =
    "--zero 0 --dp-mode ddp --servers 1 --staleness 1 --all-reduce direct --bucket-mb 4 --microbatches 1 --recompute "
    "none --pp 1 --cp 1 --tp 1 --sp=false --schedule 1f1b --cp-mode ring ";

}  // namespace tessera::test
