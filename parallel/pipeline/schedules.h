// The built-in schedules. For p ranks, m micro-batches, v chunks per rank, where F, I and W take equal times and B
// takes two of them:
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
// Condition for zb-h1: m >= p; for zb-h2 and zb-v: m >= 2p - 1; for v-min: p >= 2. With no bubble inside a rank's span,
// from its first to its last action, ranks still begin and end at different times. A micro-batch is in flight from its
// F to its B or W, in units of a rank's layers (a chunk counts 1/v).
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace tessera {

Schedule naive(int ranks, int microbatches);
Schedule gpipe(int ranks, int microbatches);
Schedule one_f_one_b(int ranks, int microbatches);
// Throws Error if `ranks` does not divide `microbatches`.
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
// Whether each rank has two chunks, with the stages in a V.
inline bool is_v(ScheduleKind kind) { return kind >= ScheduleKind::zb_v; }
const std::vector<std::string>& schedule_names();

// chunks = 0 selects the schedule's default (interleaved: 2). Throws Error (usage) with the invalid number and the
// nearest valid one.
Schedule make_schedule(ScheduleKind kind, int ranks, int microbatches, int chunks = 0);
// Reads a schedule that must match these numbers. Also throws InputError for an invalid file.
Schedule schedule_from_file(const std::string& path, int ranks, int microbatches, int chunks = 0);
// A schedule name, or a path (contains a slash or a dot).
struct NamedSchedule {
  ScheduleKind kind = ScheduleKind::one_f_one_b;
  std::string file = {};  // if not empty, replaces kind
};
// Throws Error (usage) listing the names.
NamedSchedule schedule_named(const std::string& name_or_path);
Schedule make_schedule(const std::string& name_or_path, int ranks, int microbatches, int chunks = 0);

}  // namespace tessera
