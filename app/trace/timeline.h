// The logs of all ranks in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing show.
//
//   process = rank         "rank 3 (pp 1, dp 0, tp 1)"
//   thread = track         step, forward, backward, input gradient, weight gradient, send, receive, update,
//                          waiting (the rank's own thread, for any communication), and "collective AXIS" for each
//                          axis; nothing overlaps on a track
//   "X" event              an action of the pipeline ("2F0": stage 2, micro-batch 0), a communication, a phase
//   "C" event              bytes that the rank held then, by category
#pragma once
#include <string>
#include <vector>

#include "app/trace/rank_log.h"

namespace tessera {

// The tracks in their order; those of axes follow.
inline constexpr const char* kTracks[] = {"step", "forward", "backward", "input gradient", "weight gradient",
                                          "send", "receive", "update",   "waiting"};

// One event for each line. `names` are the processes'; `kept` says which steps the file has.
std::string timeline_json(const std::vector<RankLog>& logs, const std::vector<std::string>& names,
                          const std::string& kept);

}  // namespace tessera
