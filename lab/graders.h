// One grader for each exercise; a file of lab/grade/ has one or two that are alike.
#pragma once
#include "lab/exercise.h"

namespace tessera::lab {

Held grade_messages();
Held grade_ring();
Held grade_ddp();
Held grade_zero();
Held grade_f_and_g();
Held grade_vocabulary();
Held grade_1f1b();
Held grade_zb_h1();
Held grade_ring_attention();
Held grade_clipping();
Held grade_experts();

}  // namespace tessera::lab
