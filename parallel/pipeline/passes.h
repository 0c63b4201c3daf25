// Passes: functions from a schedule to a schedule that says more. They may be applied in any order, each once.
//
//   1f1b on rank 0 of 2:    0F0 0F1 0B0 0B1
//   insert_messages         0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//   split_backward          0F0 0F1 0I0 0W0 0I1 0W1
#pragma once
#include "parallel/pipeline/schedule.h"

namespace tessera {

// Every value that crosses from one rank to another is sent as soon as it is there and received when it is needed;
// sending does not wait. Stages that are neighbours on one rank hand over without a message.
Schedule insert_messages(const Schedule& schedule);

// Every B becomes an I and a W; what is sent of the I goes between.
Schedule split_backward(const Schedule& schedule);

}  // namespace tessera
