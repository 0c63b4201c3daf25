// The command `lab`: what it lists and refuses, and the status of an exercise that is not solved. (Solved ones are on
// the page docs/lab.md; the exercises themselves in tests/lab.)

#include "tests/app/program.h"

namespace tessera {
namespace {

using LabTest = test::ProgramTest;

TEST_F(LabTest, ListsTheExercises) {
  const test::Ran r = run("lab");
  EXPECT_EQ(r.status, 0);
  for (const char* name : {" 1  messages", " 7  1f1b", "10  clipping"}) EXPECT_NE(r.out.find(name), std::string::npos);
  EXPECT_EQ(run("lab list").out, r.out);
}

TEST_F(LabTest, SaysWhatItCannotDo) {
  std::filesystem::create_directory(path("empty"));
  expect_failure("lab start", 2, "N");
  expect_failure("lab start 2", 2, "DIR");
  expect_failure("lab start 12 a", 2, "there is no exercise '12'; expected the number or the name of one: 1 messages");
  expect_failure("lab again", 2, "unexpected word 'again'");
  expect_failure("lab start 2 .", 2, "has something in it; expected a folder that is new or empty");
  expect_failure("lab check 2 empty", 4, "ring.cpp is missing; `tessera lab start 2 empty` gives it out");
  std::filesystem::copy_file(TESSERA_BINARY, path("elsewhere"));
  const test::Ran r = run_program(path("elsewhere").string(), "lab start 2 a");
  EXPECT_EQ(r.status, 2);
  EXPECT_NE(r.last_line().find("is no build folder of a checkout"), std::string::npos) << r.err;
  EXPECT_FALSE(std::filesystem::exists(path("a")));
}

TEST_F(LabTest, AnExerciseThatIsNotSolvedEndsWithOne) {
  std::filesystem::create_directory(path("mine"));
  EXPECT_EQ(run("lab start 7 mine").status, 0);
  const test::Ran r = run("lab check 7 mine");
  EXPECT_EQ(r.status, 1) << r.err;
  EXPECT_NE(r.out.find("broke  nothing\n  found  not written yet: one_f_one_b"), std::string::npos) << r.out;
}

}  // namespace
}  // namespace tessera
