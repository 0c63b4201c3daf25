// The exercises on parallel training: which functions of the real code are blanked, and who grades them.
//
// An exercise names one source file of the product and one or a few functions in it. A learner gets that file with
// the bodies blanked (lab/check.h), and a page of theory (lab/pages/NAME.md). What the learner writes is compiled
// and linked into a Tessera of their own in the place of the product's file (lab/check.h), and that program grades
// itself. So the solution of an exercise is the product's file, and a solved exercise is a Tessera that trains with it.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace tessera::lab {

// A body that is blanked.
struct Blank {
  std::string_view function;   // how its definition begins, up to the opening parenthesis at least
  std::string_view from = {};  // how the first blanked line begins; empty: the whole body
};

// Properties that an exercise was found to keep, line by line, for a learner who has solved it.
using Held = std::vector<std::string>;

struct Exercise {
  std::string_view name;
  std::string_view title;
  std::string_view file;  // from the root of the repository
  std::vector<Blank> blanks;
  // Throws Wrong for what is wrong, and whatever the learner's code throws.
  Held (*grade)() = nullptr;
  int number = 0;  // its place in the list, from 1
};

const std::vector<Exercise>& exercises();

// By number or name. Throws Error (usage) that lists them.
const Exercise& exercise(std::string_view number_or_name);

// Findings of a grader, in a learner's terms.
struct Wrong {
  std::string bound;      // which one broke: "values", "bytes", "deadlock"
  std::string found;      // where, what was expected and what was found
  std::string cause;      // the likely one; empty: none is known
  std::string more = {};  // lines behind: a picture
};

struct Verdict {
  bool solved = false;
  std::string text;  // several lines
};

// Grades what this program was built with.
Verdict grade(const Exercise& exercise);
// The verdict on one that is not solved.
Verdict refused(const Exercise& exercise, const Wrong& wrong);

// One grader for each exercise; a file of lab/grade/ has one or two that are alike.

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
