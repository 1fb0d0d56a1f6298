// Neighbouring elements of a row that one instruction loads or stores.
#pragma once

#include <type_traits>

#include "core/dispatch.h"
#include "core/dtype.h"

namespace fastmax {

template <class Element, int kElements>
struct alignas(kElements * sizeof(Element)) Vector {
  Element x[kElements];
};

// Calls function(Element(), std::integral_constant<int, elements at once>()): words of 16 bytes if rows are aligned, else elements.
template <class Function>
void dispatch_words(MathMode math, bool aligned, const Function& function) {
  dispatch_math(math, [&](auto mode) {
    using Element = typename decltype(mode)::type::Element;
    if (aligned) function(Element(), std::integral_constant<int, 16 / sizeof(Element)>());
    else function(Element(), std::integral_constant<int, 1>());
  });
}

}  // namespace fastmax
