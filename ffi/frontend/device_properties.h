// SPDX-License-Identifier: Apache-2.0
// cuDNN's description of a device, as its JSON text and as the frontend's object.

#ifndef JAX_CUDNN_DEVICE_PROPERTIES_H_
#define JAX_CUDNN_DEVICE_PROPERTIES_H_

#include <memory>
#include <string>

#include "base/status.h"

// Declared, so that not all who ask for the text include the frontend.
namespace cudnn_frontend {
class DeviceProperties;
}  // namespace cudnn_frontend

namespace jax_cudnn {

// The description of a device of this machine.
StatusOr<std::string> DescribeDevice(int device);

StatusOr<std::shared_ptr<const cudnn_frontend::DeviceProperties>> ReadDeviceProperties(
    const std::string& text);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_DEVICE_PROPERTIES_H_
