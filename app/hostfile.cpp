// Lines and words.
#include "app/hostfile.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "tensor/error.h"

namespace tessera {
namespace {

constexpr std::string_view kBlanks = " \t\r";
constexpr size_t kMostHosts = 100000, kMostLetters = 255;
constexpr int64_t kMostSlots = 100000;

std::string_view take_word(std::string_view& line) {
  const size_t begin = std::min(line.find_first_not_of(kBlanks), line.size());
  const size_t end = std::min(line.find_first_of(kBlanks, begin), line.size());
  const std::string_view word = line.substr(begin, end - begin);
  line.remove_prefix(end);
  return word;
}

Host host_of(std::string_view line, const std::string& where) {
  std::string_view name = take_word(line), slots = take_word(line);
  if (slots.starts_with("slots="))
    slots.remove_prefix(std::string_view("slots=").size());
  else if (const size_t colon = name.find(':'); slots.empty() && colon != name.npos)
    slots = name.substr(colon + 1), name = name.substr(0, colon);
  else if (!slots.empty())
    throw InputError(fmt::format("{}: expected slots=N behind the host, found '{}'", where, slots));
  else
    slots = "1";
  if (name.empty() || name.size() > kMostLetters)
    throw InputError(fmt::format("{}: expected the name of a host, of 1 to {} letters", where, kMostLetters));
  Host out{.name = std::string(name)};
  const auto [end, error] = std::from_chars(slots.data(), slots.data() + slots.size(), out.slots);
  if (error != std::errc() || end != slots.data() + slots.size() || out.slots < 0 || out.slots > kMostSlots)
    throw InputError(fmt::format("{}: expected 0 to {} slots, found '{}'", where, kMostSlots, slots));
  if (const std::string_view more = take_word(line); !more.empty())
    throw InputError(fmt::format("{}: expected nothing behind the slots, found '{}'", where, more));
  return out;
}

}  // namespace

std::vector<Host> parse_hosts(std::string_view text, const std::string& what) {
  std::vector<Host> out;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(kBlanks) == line.npos) continue;
    if (out.size() == kMostHosts) throw InputError(fmt::format("{}: expected at most {} hosts", what, kMostHosts));
    out.push_back(host_of(line, fmt::format("{}: line {}", what, number)));
  }
  return out;
}

int64_t slots_of(const std::vector<Host>& hosts) {
  int64_t all = 0;
  for (const Host& host : hosts) all += host.slots;
  return all;
}

}  // namespace tessera
