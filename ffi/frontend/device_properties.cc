// SPDX-License-Identifier: Apache-2.0
// Asking for and reading descriptions of devices.

#include "frontend/device_properties.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "frontend/frontend.h"
#include "frontend/frontend_status.h"

namespace jax_cudnn {

namespace fe = cudnn_frontend;

StatusOr<std::string> DescribeDevice(int device) {
  fe::DeviceProperties properties;
  properties.set_device_id(device);
  std::vector<uint8_t> bytes;
  for (const auto& step : {properties.build(), properties.serialize(bytes)}) {
    if (step.is_bad()) {
      return Internal("cuDNN cannot describe device " + std::to_string(device) + ": " +
                      Message(step));
    }
  }
  std::string text(bytes.begin(), bytes.end());
  text.resize(std::min(text.size(), text.find('\0')));
  return text;
}

StatusOr<std::shared_ptr<const fe::DeviceProperties>> ReadDeviceProperties(
    const std::string& text) {
  auto properties = std::make_shared<fe::DeviceProperties>();
  if (const auto error =
          properties->deserialize(std::vector<uint8_t>(text.begin(), text.end()));
      error.is_bad()) {
    return InvalidArgument("cuDNN cannot use these device properties: " +
                           Message(error));
  }
  return std::shared_ptr<const fe::DeviceProperties>(std::move(properties));
}

}  // namespace jax_cudnn
