// MPI itself: begun once in a process and ended once, and how it is recognised that a program was started under it.
#pragma once
#include <functional>
#include <string>

namespace tessera {

// Begins MPI unless it runs already, and ends it in that case; not while an exception passes, since the end waits for
// all ranks, and the launcher ends them when this one has gone. Throws Error where the library cannot be used by
// several threads at a time, which communication in the background needs. launch() makes its own; a program that
// launches more than once under MPI holds one from its start to its end, since MPI cannot be begun again.
class MpiSession {
 public:
  MpiSession();
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

 private:
  bool owner_ = false;
  int exceptions_ = 0;  // under way when it was made
};

// Prints "tessera: [rank r] line", does what is given, and ends all ranks of the job with the status.
[[noreturn]] void end_mpi_job(
    const std::string& line, int status, const std::function<void()>& before_the_end = [] {});

// Throws CommError with MPI's own words for what went wrong in `call`.
void mpi_check(int code, const char* call);

}  // namespace tessera
