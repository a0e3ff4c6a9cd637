// SPDX-License-Identifier: Apache-2.0
// The backend's descriptors of a resample's gradient.
//
// The frontend (1.28.0) has a node for the forward direction only.

#include "nodes/resample_backward.h"

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using Descriptor = fe::ManagedOpaqueDescriptor;

std::vector<cudnnFraction_t> Fractions(const std::vector<int64_t>& values) {
  std::vector<cudnnFraction_t> fractions;
  fractions.reserve(values.size());
  for (const int64_t value : values) fractions.push_back({value, 1});
  return fractions;
}

// Sets the attributes of a backend descriptor, until one is refused.
class Writer {
 public:
  explicit Writer(cudnnBackendDescriptorType_t type)
      : descriptor_(fe::make_shared_backend_pointer(type)),
        status_(descriptor_->get_status()) {}

  void Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
           int64_t count, const void* values) {
    if (status_ != CUDNN_STATUS_SUCCESS) return;
    status_ = fe::detail::set_attribute(descriptor_->get_backend_descriptor(), name,
                                        type, count, values);
  }

  void Set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    cudnnBackendDescriptor_t raw = other->get_backend_descriptor();
    Set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, static_cast<const void*>(&raw));
  }

  // The finished descriptor; null with cuDNN's status in `error` if it is refused.
  Descriptor Finish(fe::error_t& error) {
    if (status_ == CUDNN_STATUS_SUCCESS) {
      status_ = fe::detail::finalize(descriptor_->get_backend_descriptor());
    }
    if (status_ == CUDNN_STATUS_SUCCESS) return descriptor_;
    error = {
        fe::error_code_t::CUDNN_BACKEND_API_FAILED,
        std::string("resample backward: ") + fe::detail::get_error_string(status_)};
    return nullptr;
  }

 private:
  Descriptor descriptor_;
  cudnnStatus_t status_;
};

Descriptor ResampleDescriptor(const ResampleGeometry& geometry, fe::error_t& error) {
  cudnnResampleMode_t mode{};
  cudnnPaddingMode_t padding{};
  cudnnDataType_t dtype{};
  for (const cudnnStatus_t status :
       {fe::detail::convert_to_cudnn_type(geometry.mode, mode),
        fe::detail::convert_to_cudnn_type(geometry.padding_mode, padding),
        fe::detail::convert_to_cudnn_type(geometry.compute_dtype, dtype)}) {
    if (status != CUDNN_STATUS_SUCCESS) {
      error = {fe::error_code_t::INVALID_VALUE, "resample backward: an unknown mode"};
      return nullptr;
    }
  }
  const cudnnNanPropagation_t nan = CUDNN_PROPAGATE_NAN;
  const auto count = static_cast<int64_t>(geometry.window.size());
  Writer writer(CUDNN_BACKEND_RESAMPLE_DESCRIPTOR);
  writer.Set(CUDNN_ATTR_RESAMPLE_MODE, CUDNN_TYPE_RESAMPLE_MODE, 1, &mode);
  writer.Set(CUDNN_ATTR_RESAMPLE_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &dtype);
  writer.Set(CUDNN_ATTR_RESAMPLE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, 1, &nan);
  writer.Set(CUDNN_ATTR_RESAMPLE_PADDING_MODE, CUDNN_TYPE_PADDING_MODE, 1, &padding);
  writer.Set(CUDNN_ATTR_RESAMPLE_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &count);
  for (const auto& [name, values] :
       {std::pair(CUDNN_ATTR_RESAMPLE_WINDOW_DIMS, &geometry.window),
        std::pair(CUDNN_ATTR_RESAMPLE_STRIDES, &geometry.strides),
        std::pair(CUDNN_ATTR_RESAMPLE_PRE_PADDINGS, &geometry.padding_low),
        std::pair(CUDNN_ATTR_RESAMPLE_POST_PADDINGS, &geometry.padding_high)}) {
    const std::vector<cudnnFraction_t> fractions = Fractions(*values);
    writer.Set(name, CUDNN_TYPE_FRACTION, count, fractions.data());
  }
  return writer.Finish(error);
}

class ResampleBackward : public fe::graph::INode {
 public:
  ResampleBackward(const fe::detail::Context& context, ResampleGeometry geometry,
                   TensorPtr grad_output, TensorPtr grad_x)
      : INode(context),
        geometry_(std::move(geometry)),
        grad_output_(std::move(grad_output)),
        grad_x_(std::move(grad_x)) {}

  Type getType() override { return Type::RESAMPLE; }

  // For the frontend's own text of a graph, which nobody reads: ours is the key.
  void serialize(nlohmann::json& json) const override { json["tag"] = "RESAMPLE_BWD"; }

 private:
  // All is said of both tensors when they are made.
  fe::error_t infer_properties_node() override { return {}; }

  fe::error_t collect_tensor_attributes_node(
      std::vector<TensorPtr>& tensors) const override {
    tensors.insert(tensors.end(), {grad_output_, grad_x_});
    return {};
  }

  fe::error_t create_cudnn_tensors_node(
      std::unordered_map<int64_t, std::shared_ptr<fe::Tensor>>& tensors)
      const override {
    fe::error_t error = fe::detail::create_cudnn_tensor(grad_output_, tensors);
    if (error.is_bad()) return error;
    return fe::detail::create_cudnn_tensor(grad_x_, tensors);
  }

 protected:
  fe::error_t create_cudnn_operations(
      std::unordered_set<int64_t>& uids,
      std::vector<std::shared_ptr<fe::Operation>>& /*operations*/,
      std::vector<Descriptor>& raw_operations,
      std::unordered_map<int64_t, std::shared_ptr<fe::Tensor>>& tensors)
      const override {
    fe::error_t error;
    const Descriptor resample = ResampleDescriptor(geometry_, error);
    if (resample == nullptr) return error;
    const double alpha = 1;
    const double beta = 0;
    Writer writer(CUDNN_BACKEND_OPERATION_RESAMPLE_BWD_DESCRIPTOR);
    writer.Set(CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DYDESC,
               tensors.at(grad_output_->get_uid())->get_desc());
    writer.Set(CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DXDESC,
               tensors.at(grad_x_->get_uid())->get_desc());
    writer.Set(CUDNN_ATTR_OPERATION_RESAMPLE_BWD_ALPHA, CUDNN_TYPE_DOUBLE, 1, &alpha);
    writer.Set(CUDNN_ATTR_OPERATION_RESAMPLE_BWD_BETA, CUDNN_TYPE_DOUBLE, 1, &beta);
    writer.Set(CUDNN_ATTR_OPERATION_RESAMPLE_BWD_DESC, resample);
    const Descriptor operation = writer.Finish(error);
    if (operation == nullptr) return error;
    raw_operations.push_back(operation);
    uids.insert({grad_output_->get_uid(), grad_x_->get_uid()});
    return {};
  }

 private:
  const ResampleGeometry geometry_;
  const TensorPtr grad_output_;
  const TensorPtr grad_x_;
};

}  // namespace

std::shared_ptr<fe::graph::INode> MakeResampleBackward(
    const fe::detail::Context& context, ResampleGeometry geometry,
    TensorPtr grad_output, TensorPtr grad_x) {
  return std::make_shared<ResampleBackward>(context, std::move(geometry),
                                            std::move(grad_output), std::move(grad_x));
}

}  // namespace jax_cudnn
