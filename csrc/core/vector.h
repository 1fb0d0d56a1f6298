// Neighbouring elements of a row that one instruction loads or stores.
#pragma once

namespace fastmax {

template <class Element, int kElements>
struct alignas(kElements * sizeof(Element)) Vector {
  Element x[kElements];
};

}  // namespace fastmax
