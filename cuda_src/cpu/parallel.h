// A typed face for the ParallelFor callback.
#pragma once

#include "cpu/kernels.h"

namespace gsp::cpu {

template <typename Body>
void for_each(ParallelFor parallel_for, int64_t count, const Body& body) {
  parallel_for(
      count, [](int64_t i, void* context) { (*static_cast<const Body*>(context))(i); },
      const_cast<Body*>(&body));
}

}  // namespace gsp::cpu
