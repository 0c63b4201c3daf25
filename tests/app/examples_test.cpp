// The schedule of examples/: it is valid, has the documented properties, and trains like one rank.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "app/resolve.h"
#include "examples/eager_1f1b.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tests/app/program.h"
#include "verify/verify.h"

namespace tessera {
namespace {

TEST(Examples, Eager1f1bIsValidSchedule) {
  for (int p = 1; p <= 6; ++p)
    for (int m = 1; m <= 3 * p; ++m) {
      const Schedule s = eager_1f1b(p, m);
      EXPECT_NO_THROW(validate(s)) << p << " " << m;
      for (int i = 0; i < p; ++i)
        EXPECT_EQ(peak_in_flight(s)[static_cast<size_t>(i)], std::min(m, 2 * (p - i) - 1)) << p << " " << m;
      EXPECT_EQ(simulate(s).makespan, simulate(one_f_one_b(p, m)).makespan) << p << " " << m;
    }
}

// If a message takes at most half of a forward and backward pass, only the first round trip costs time.
TEST(Examples, Eager1f1bHidesMessageLatency) {
  for (int p = 2; p <= 6; ++p)
    for (int m = 2 * p; m <= 4 * p; ++m)
      for (const double message : {0.25, 0.5, 1.0}) {
        const Times times{.stages = {{}}, .message = message};
        const double eager = simulate(eager_1f1b(p, m), times).makespan;
        EXPECT_EQ(eager, 3 * (m + p - 1) + 2 * (p - 1) * message) << p << " " << m << " " << message;
        EXPECT_LT(eager, simulate(one_f_one_b(p, m), times).makespan) << p << " " << m << " " << message;
      }
}

TEST(Examples, Eager1f1bDiagramMatchesSchedule) {
  const std::string text = read_file(std::string(TESSERA_SOURCE_DIR) + "/examples/eager_1f1b.h");
  for (const Schedule& s : {one_f_one_b(2, 4), eager_1f1b(2, 4)}) {
    std::string picture = "//   " + s.name + "\n";
    for (const std::string& row : test::to_lines(draw(simulate(s, {.stages = {{}}, .message = 1}))))
      picture += "//   " + row + "\n";
    expect_has(text, picture);
  }
}

TEST(Examples, Eager1f1bTrainsLikeOneRank) {
  const TemporaryDirectory directory(fs::temp_directory_path() / "tessera-examples-");
  const fs::path file = directory.path() / "eager.txt";
  std::ofstream(file) << to_text(eager_1f1b(3, 6));
  TypedOptions o = verify_defaults();
  for (const auto& [name, value] : {std::pair{"layers", 3},
                                    {"heads", 2},
                                    {"channels", 16},
                                    {"context", 16},
                                    {"steps", 3},
                                    {"pp", 3},
                                    {"microbatches", 6},
                                    {"batch", 6},
                                    {"threads_per_rank", 1}})
    o[name] = value;
  o["schedule"] = file.string();
  const VerifyResult r = verify(resolve(o));
  EXPECT_TRUE(r.passed()) << r.failures.front();
  EXPECT_TRUE(r.bitwise);
  EXPECT_EQ(r.in_flight, (std::vector<int64_t>{5, 3, 1}));
}

}  // namespace
}  // namespace tessera
