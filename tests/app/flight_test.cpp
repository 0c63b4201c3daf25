// A run that fails leaves what its ranks did last, and `report` shows it; one in which a rank is slow says which.
#include <thread>

#include "app/report/report.h"
#include "tensor/error.h"
#include "tests/app/program.h"

namespace tessera {
namespace {

using test::ProgramTest;
using test::Ran;

const char* const kFile =
    R"({"rank": 1, "ranks": 3, "cause": "dp axis, barrier: rank 2 did not come", "operations": [)"
    R"({"axis": "dp", "number": 1, "operation": "all_reduce", "bytes": 40, "begun": 1.0, "ended": 1.5}, )"
    R"({"axis": "dp", "number": 2, "operation": "barrier", "bytes": 0, "begun": 2.0, "ended": null}]})"
    "\n"
    R"({"rank": 0, "ranks": 3, "cause": "", "operations": [)"
    R"({"axis": "dp", "number": 1, "operation": "all_reduce", "bytes": 40, "begun": 1.0, "ended": 1.5}, )"
    R"({"axis": "dp", "number": 2, "operation": "all_gather", "bytes": 8, "begun": 2.0, "ended": null}]})"
    "\n";

TEST(FlightReport, ShowsWhoIsMissingAndWhoDiffers) {
  const report::Flights all = report::parse_flights(kFile, "flight.json");
  ASSERT_EQ(all.ranks, 3);
  ASSERT_EQ(all.written.size(), 2U);
  EXPECT_EQ(all.written[0].rank, 0);
  const std::string text = report::flights_of(all, false), html = report::flights_of(all, true);
  EXPECT_NE(text.find("rank 1    dp axis, barrier: rank 2 did not come"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 2    wrote nothing"), std::string::npos) << text;
  const size_t second = text.find("\n  2 ");
  ASSERT_NE(second, std::string::npos) << text;
  EXPECT_NE(text.find("DIFFERS", second), std::string::npos) << text;
  EXPECT_EQ(text.substr(0, second).find("DIFFERS"), std::string::npos) << text;
  EXPECT_NE(text.find("barrier of 0 bytes, from 2.000 s on", second), std::string::npos) << text;
  EXPECT_NE(html.find("<tr class=\"differs\">"), std::string::npos);
  EXPECT_NE(html.find("wrote nothing"), std::string::npos);
}

TEST(FlightReport, RefusesWhatIsNone) {
  for (const char* file : {"[]", "{}", R"({"rank": 5, "ranks": 2, "cause": "", "operations": []})",
                           R"({"rank": 0, "ranks": 1, "cause": "", "operations": [{"axis": 3}]})",
                           R"({"rank": -1, "ranks": 1, "cause": "", "operations": []})"})
    EXPECT_THROW(report::parse_flights(file, "flight.json"), InputError) << file;
}

class FlightOfRun : public ProgramTest {};

// The loss is soon no number: every rank says why it ended, and the table is drawn.
TEST_F(FlightOfRun, IsLeftByAFailureAndDrawn) {
  const Ran failed = train("--ranks 2 --lr 1e30 --steps 200 --out run");
  ASSERT_EQ(failed.status, 5) << failed.err;
  ASSERT_TRUE(std::filesystem::exists(path("run/flight.json")));
  const Ran drawn = run("report run --format text");
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  EXPECT_NE(drawn.out.find("axis dp"), std::string::npos) << drawn.out;
  EXPECT_NE(drawn.out.find("all_reduce"), std::string::npos) << drawn.out;
  EXPECT_EQ(run("report run").status, 0);
  EXPECT_TRUE(std::filesystem::exists(path("run/report.html")));
}

TEST_F(FlightOfRun, IsNotThereAfterAGoodEnd) {
  const Ran r = train("--ranks 2 --format json --out run");
  ASSERT_EQ(r.status, 0) << r.err;
  EXPECT_FALSE(std::filesystem::exists(path("run/flight.json")));
  EXPECT_NE(r.out.find("\"straggler\":null"), std::string::npos) << r.out;
}

}  // namespace
}  // namespace tessera
