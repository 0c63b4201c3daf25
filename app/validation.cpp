// Validation, part by part.
#include "app/validation.h"

namespace tessera {

std::optional<Validation> validation_of(const Dataset& d, int64_t context, const MeanLoss& mean_loss) {
  Validation out;
  if (d.parts.empty()) {
    const std::optional<double> loss = mean_loss(*d.validation(context));
    if (!loss) return {};
    return Validation{*loss, d.bits_per_byte(*loss)};
  }
  double shares = 0;
  for (const MixturePart& p : d.parts) {
    const std::optional<double> loss = mean_loss(*p.dataset->validation(context));
    if (!loss) return {};
    out.parts.push_back({p.name, *loss, p.dataset->bits_per_byte(*loss)});
    out.loss += static_cast<double>(p.share) * *loss;
    shares += static_cast<double>(p.share);
  }
  out.loss /= shares;
  out.bits_per_byte = d.bits_per_byte(out.loss);
  return out;
}

}  // namespace tessera
