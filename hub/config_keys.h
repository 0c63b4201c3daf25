// The keys of a config.json, each asked for by its name; one that nobody has asked for is refused at the end.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera {

class ConfigKeys {
 public:
  // Both must outlive it; `what` names the file in messages. Everything throws InputError.
  ConfigKeys(const nlohmann::json& json, const std::string& what) : json_(json), what_(what) {}

  [[noreturn]] void refuse(const std::string& key, const std::string& expected, const nlohmann::json& found) const;
  // null counts as a key that is not there.
  const nlohmann::json* find(const std::string& key);
  int64_t size(const std::string& key, std::optional<int64_t> usual = {});
  double number(const std::string& key, std::optional<double> usual = {});
  bool flag(const std::string& key, bool usual);
  // Where a key is there, it must have one of these values.
  void must_be(const std::string& key, const std::vector<nlohmann::json>& values);
  // All keys were asked for, but those without effect on what a layer computes.
  void end() const;
  const std::string& what() const { return what_; }

 private:
  const nlohmann::json& json_;
  const std::string& what_;
  std::set<std::string> known_;
};

}  // namespace tessera
