// The system's calls about files, watched, and refused as some file systems refuse them: by functions of the same name,
// which the program finds before the C library's.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace tessera::test {

struct Watched {
  std::string call, path;
};
// Takes each call while a test runs; null: nobody listens.
extern std::vector<Watched>* watched;

// Calls that are refused, and the errno of each: "renameat2" (with flags), "fsync" (of folders), "fallocate", "mmap".
extern std::map<std::string, int> refused;

}  // namespace tessera::test
