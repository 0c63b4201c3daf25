// Runs a Python script as an independent reference, exchanging files in a temporary directory.
//
// The interpreter is $TESSERA_PYTHON, otherwise /usr/bin/python3. Tests that need a module check missing() first and
// skip themselves with the reason.
#pragma once
#include <fmt/format.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace tessera::test {

inline std::string python() {
  const char* const chosen = std::getenv("TESSERA_PYTHON");
  return chosen != nullptr && *chosen != '\0' ? chosen : "/usr/bin/python3";
}

// Why the module is unavailable, or empty.
inline std::string missing(const std::string& module) {
  const std::string command = fmt::format("'{}' -c 'import {}' > /dev/null 2>&1", python(), module);
  return std::system(command.c_str()) == 0 ? "" : fmt::format("{} cannot import {}", python(), module);
}

// A temporary directory, removed with the object; its files are raw little-endian arrays or text.
class Exchange {
 public:
  Exchange() {
    std::string path = (std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) throw std::runtime_error("cannot make the folder " + path);
    directory_ = path;
  }
  ~Exchange() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  std::filesystem::path path(const std::string& name) const { return directory_ / name; }

  template <class T>
  void write(const std::string& name, std::span<const T> values) const {
    std::ofstream file(path(name), std::ios::binary);
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size_bytes()));
    if (!file) throw std::runtime_error("cannot write " + path(name).string());
  }
  void write_text(const std::string& name, const std::string& text) const { write(name, std::span<const char>(text)); }
  template <class T>
  std::vector<T> read(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    std::vector<T> values(std::filesystem::file_size(path(name)) / sizeof(T));
    file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
    if (!file) throw std::runtime_error("cannot read " + path(name).string());
    return values;
  }

  // Runs the script file in the directory; throws its output on failure.
  void run(const std::filesystem::path& script, const std::string& arguments = "") const {
    const std::string command = fmt::format("cd '{}' && '{}' '{}' {} > output.txt 2>&1", directory_.string(), python(),
                                            script.string(), arguments);
    if (std::system(command.c_str()) == 0) return;
    const std::vector<char> output = read<char>("output.txt");
    throw std::runtime_error(script.string() + " failed: " + std::string(output.begin(), output.end()));
  }

 private:
  std::filesystem::path directory_;
};

}  // namespace tessera::test
