// The schedules that Tessera knows. Each is a function of a few numbers; the file of its name draws and explains it.
//
// p ranks, m micro-batches, v chunks per rank; times of F, I and W are equal and B takes two of them:
//
//   schedule      backward  bubble / total           micro-batches in flight on rank i     boundaries on the wire
//   naive         B         (p-1) / p                1                                     p - 1
//   gpipe         B         (p-1) / (m+p-1)          m                                     p - 1
//   1f1b          B         (p-1) / (m+p-1)          min(m, p-i)                           p - 1
//   interleaved   B         (p-1) / (vm+p-1)         rank 0: min(m, p + (p-1)/v)           p v - 1
//   zb-h1         I, W      (p-1) / (3m+p-1)         min(m, p)                             p - 1
//   zb-h2         I, W      0 inside a rank's span   min(m, 2p-1)                          p - 1
//   zb-v          I, W      0 inside a rank's span   min(m, p)                             2p - 2
//   v-half        I, W      about p / (2m+p)         min(m, floor((p+2)/2))                2p - 2
//   v-min         I, W      (4p-5) / (6m+4p-5)       min(m, floor((p+4)/3))                2p - 2
//
// zb-h1 for m >= p; zb-h2 and zb-v for m >= 2p - 1: between its first and its last action no rank waits, but ranks
// begin and end at different times; v-min for p >= 2. A micro-batch is in flight from its F to its B or W; the unit is
// a rank's whole share of the layers (a chunk counts 1/v).
#pragma once
#include <array>

#include "parallel/pipeline/schedule.h"

namespace tessera {

Schedule naive(int ranks, int microbatches);
Schedule gpipe(int ranks, int microbatches);
Schedule one_f_one_b(int ranks, int microbatches);
// Throws Error when `ranks` does not divide `microbatches`.
Schedule interleaved(int ranks, int microbatches, int chunks);
Schedule zb_h1(int ranks, int microbatches);
Schedule zb_h2(int ranks, int microbatches);
Schedule zb_v(int ranks, int microbatches);
Schedule v_half(int ranks, int microbatches);
Schedule v_min(int ranks, int microbatches);

enum class ScheduleKind : uint8_t { naive, gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, v_half, v_min };
inline constexpr std::array<std::string_view, 9> kScheduleNames = {"naive", "gpipe", "1f1b",   "interleaved", "zb-h1",
                                                                   "zb-h2", "zb-v",  "v-half", "v-min"};
inline bool splits_backward(ScheduleKind kind) { return kind >= ScheduleKind::zb_h1; }
// Two chunks on each rank, the stages in a V.
inline bool is_v(ScheduleKind kind) { return kind >= ScheduleKind::zb_v; }
const std::vector<std::string>& schedule_names();

// `chunks` may be 0: as many as the schedule has (interleaved: 2). Throws Error (usage) that names the number that does
// not fit and one that does.
Schedule make_schedule(ScheduleKind kind, int ranks, int microbatches, int chunks = 0);
// The schedule in a file, which must be for these numbers. Throws InputError too, for a fault in the file.
Schedule schedule_from_file(const std::string& path, int ranks, int microbatches, int chunks = 0);
// A user's word for a schedule: its name, or the path of a file, which has a slash or a dot in it.
struct NamedSchedule {
  ScheduleKind kind = ScheduleKind::one_f_one_b;
  std::string file = {};  // not empty: this, and no kind
};
// Throws Error (usage) listing the names.
NamedSchedule schedule_named(const std::string& name_or_path);
Schedule make_schedule(const std::string& name_or_path, int ranks, int microbatches, int chunks = 0);

}  // namespace tessera
