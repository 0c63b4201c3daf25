// Rows of tokens of one length, with a target for each token: what validation walks through, and fine-tuning draws
// from.
#pragma once
#include <cstdint>

namespace tessera {

class Rows {
 public:
  static constexpr int32_t kIgnored = -1;  // a target that is not trained and does not count

  virtual ~Rows() = default;
  virtual int64_t context() const = 0;  // tokens of a row
  virtual int64_t count() const = 0;
  // How many targets of all rows are not kIgnored; at least 1.
  virtual int64_t targets() const = 0;
  // Rows [first, first + count) of [0, count()): `inputs` and `targets` are (count, context). Throws Error (usage).
  virtual void load(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const = 0;
  // Whether the rows themselves say where documents begin, and then: for each token of some rows, (count, context), the
  // place in its row where its document begins.
  virtual bool has_starts() const { return false; }
  virtual void starts(int64_t /*first*/, int64_t /*count*/, int32_t* /*out*/) const {}
};

}  // namespace tessera
