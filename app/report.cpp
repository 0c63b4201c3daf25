// The command `report`.
#include "app/commands.h"
namespace tessera { int run_report(const ReportOptions&) { return 0; } }
