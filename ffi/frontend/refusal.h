// SPDX-License-Identifier: Apache-2.0
// Makes cuDNN's words about why it has no plan readable, without adding to them.

#ifndef JAX_CUDNN_REFUSAL_H_
#define JAX_CUDNN_REFUSAL_H_

#include <string>
#include <string_view>
#include <vector>

namespace jax_cudnn {

// Takes cuDNN's error text apart. Where it goes through its engines one by one, with
// the whole call stack for each, the first telling line of each engine is kept, and
// engines that say the same share a line. Any other text comes back on one line.
std::vector<std::string> RefusalReasons(std::string_view text);

// The text with its line breaks as spaces and its end trimmed.
std::string OneLine(std::string_view text);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_REFUSAL_H_
