// Normal form C by libutf8proc, stretch by stretch of what is not ASCII.
#include "data/hub_tokenizer/nfc.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "data/utf8.h"
#include "tensor/error.h"

namespace tessera::hub {
namespace {

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

// Marks in order of class, by our own stable sort: the library's takes the square of their number.
void order_marks(std::vector<utf8proc_int32_t>& points) {
  const auto mark = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (auto at = points.begin(); at != points.end();) {
    if (mark(*at) == 0) {
      ++at;
      continue;
    }
    const auto end = std::find_if(at, points.end(), [&](utf8proc_int32_t c) { return mark(c) == 0; });
    std::stable_sort(at, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) { return mark(a) < mark(b); });
    at = end;
  }
}

void append_normal(std::string& out, std::string_view stretch, std::vector<utf8proc_int32_t>& points) {
  points.clear();
  for (size_t position = 0; position < stretch.size();) {
    const auto c = static_cast<utf8proc_int32_t>(next_code_point(stretch, position).value());
    utf8proc_int32_t parts[8];  // a character has at most four in normal form D
    int boundary = 0;
    const utf8proc_ssize_t n = utf8proc_decompose_char(c, parts, 8, UTF8PROC_DECOMPOSE, &boundary);
    if (n < 0 || n > 8) throw Error(fmt::format("utf8proc cannot take apart U+{:04X}", c));
    points.insert(points.end(), parts, parts + n);
  }
  order_marks(points);
  const auto composed = utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (composed < 0) throw Error(fmt::format("utf8proc: {}", utf8proc_errmsg(composed)));
  for (utf8proc_ssize_t i = 0; i < composed; ++i)
    append_utf8(out, static_cast<char32_t>(points[static_cast<size_t>(i)]));
}

}  // namespace

std::string to_nfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::vector<utf8proc_int32_t> points;
  while (!text.empty()) {
    const size_t other = static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_ascii) - text.begin());
    const size_t plain = other == text.size() ? other : other - (other > 0 ? 1 : 0);  // the letter that takes a mark
    out += text.substr(0, plain);
    text.remove_prefix(plain);
    if (text.empty()) break;
    const auto end = std::find_if(text.begin() + 1, text.end(), is_ascii);
    const auto length = static_cast<size_t>(end - text.begin());
    append_normal(out, text.substr(0, length), points);
    text.remove_prefix(length);
  }
  return out;
}

}  // namespace tessera::hub
