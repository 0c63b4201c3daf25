// A transport in which some calls do something else.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "verify/defects/around_transport.h"
#include "verify/verify.h"

namespace tessera {

// Which calls of which axis, and what happens instead; returns the bytes that were sent.
struct Spoilt {
  std::function<bool(const std::string& axis, const Call& call)> which;
  std::function<int64_t(Transport& transport, const Call& call)> instead;
};

class SpoiltTransport final : public AroundTransport {
 public:
  SpoiltTransport(std::unique_ptr<Transport> inner, Spoilt spoilt)
      : AroundTransport(std::move(inner)), spoilt_(std::move(spoilt)) {}
  int64_t direct(const Call& call) override {
    return spoilt_.which(axis_, call) ? spoilt_.instead(inner(), call) : inner().direct(call);
  }

 protected:
  std::unique_ptr<Transport> around(std::unique_ptr<Transport> made) const override {
    return std::make_unique<SpoiltTransport>(std::move(made), spoilt_);
  }

 private:
  Spoilt spoilt_;
};

// On every rank.
inline void spoil(VerifyHooks& hooks, const Spoilt& spoilt) {
  hooks.launching = [before = std::move(hooks.launching), spoilt](LaunchOptions& how) {
    before(how);
    how.around = [spoilt](std::unique_ptr<Transport> transport) {
      return std::make_unique<SpoiltTransport>(std::move(transport), spoilt);
    };
  };
}

}  // namespace tessera
