// Fixture for tests of small models, which run fastest with one thread.
#pragma once
#include <gtest/gtest.h>

#include "tensor/cpu/vectorize.h"

namespace tessera::test {

class OneThread : public testing::Test {
 protected:
  void SetUp() override { cpu::set_threads(1); }
  void TearDown() override { cpu::set_threads(threads_); }

 private:
  int threads_ = cpu::threads();
};

}  // namespace tessera::test
