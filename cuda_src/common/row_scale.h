// The factors that a row has by its degree, the same on every device.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/reducer.h"

namespace gsp {

// 1 / max(degree, 1) where `inverse`; else of graph convolutions: degree^-1/2 or 0, and, where
// self loops are wanted, what is missing of the row's own, which some of its edges may be already.
template <typename Scalar>
struct RowScale {
  Scalar scale, own = 0;

  GSP_HD RowScale(bool inverse, bool wanted, int64_t degree, int64_t loops) {
    if (inverse) {
      scale = Scalar(1) / Scalar(degree > 1 ? degree : 1);
      return;
    }
    const int64_t counted = degree - loops + (wanted ? 1 : 0);
    scale = counted > 0 ? Scalar(1 / sqrt(double(counted))) : Scalar(0);
    own = scale * scale * Scalar(1 - loops);
  }
};

}  // namespace gsp
