// SPDX-License-Identifier: Apache-2.0
// From a node's roles to the frontend's tensors.

#include "frontend/node_writer.h"

#include <algorithm>

namespace jax_cudnn {
namespace {

namespace fe = cudnn_frontend;
using Attributes = fe::graph::Tensor_attributes;

fe::DataType_t FrontendDType(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return fe::DataType_t::BOOLEAN;
    case DType::kU8:
      return fe::DataType_t::UINT8;
    case DType::kI8:
      return fe::DataType_t::INT8;
    case DType::kI32:
      return fe::DataType_t::INT32;
    case DType::kI64:
      return fe::DataType_t::INT64;
    case DType::kF4E2m1fn:
      return fe::DataType_t::FP4_E2M1;
    case DType::kF8E4m3fn:
      return fe::DataType_t::FP8_E4M3;
    case DType::kF8E5m2:
      return fe::DataType_t::FP8_E5M2;
    case DType::kF8E8m0fnu:
      return fe::DataType_t::FP8_E8M0;
    case DType::kBf16:
      return fe::DataType_t::BFLOAT16;
    case DType::kF16:
      return fe::DataType_t::HALF;
    case DType::kF32:
      return fe::DataType_t::FLOAT;
    case DType::kF64:
      return fe::DataType_t::DOUBLE;
  }
  return fe::DataType_t::NOT_SET;
}

}  // namespace

TensorPtr NodeWriter::Input(std::string_view role) {
  const std::string& name = *FindName(role);
  TensorPtr& tensor = tensors_[name];
  if (tensor == nullptr) tensor = graph_.tensor(Describe(name));
  return tensor;
}

TensorPtr NodeWriter::InputAs(std::string_view role, const std::vector<int64_t>& dims,
                              const std::vector<int64_t>& strides) {
  const TensorPtr tensor = Input(role);
  tensor->set_dim(dims).set_stride(strides);
  return tensor;
}

TensorPtr NodeWriter::NewOutput(std::string_view role) {
  const std::string& name = *FindName(role);
  const TensorPtr tensor = graph_.tensor(Describe(name));
  Finish(name, tensor);
  return tensor;
}

void NodeWriter::Output(std::string_view role, const TensorPtr& tensor) {
  const std::string& name = *FindName(role);
  const TensorSpec& spec = spec_.Tensor(name);
  tensor->set_uid(TensorUid(spec_, name))
      .set_name(name)
      .set_dim(spec.dims)
      .set_stride(spec.Strides())
      .set_data_type(FrontendDType(spec.dtype));
  Finish(name, tensor);
}

const std::string* NodeWriter::FindName(std::string_view role) const {
  for (const auto* roles : {&node_->inputs, &node_->outputs}) {
    if (const auto found = roles->find(role); found != roles->end()) {
      return &found->second;
    }
  }
  return nullptr;
}

Attributes NodeWriter::Describe(const std::string& name) const {
  const TensorSpec& spec = spec_.Tensor(name);
  return Attributes()
      .set_uid(TensorUid(spec_, name))
      .set_name(name)
      .set_dim(spec.dims)
      .set_stride(spec.Strides())
      .set_data_type(FrontendDType(spec.dtype));
}

void NodeWriter::Finish(const std::string& name, const TensorPtr& tensor) {
  if (IsResultName(name)) tensor->set_output(true);
  tensors_[name] = tensor;
}

bool NodeWriter::IsResultName(const std::string& name) const {
  const auto& outputs = spec_.outputs;
  const auto& within = spec_.Tensor(name).within;
  return std::find(outputs.begin(), outputs.end(),
                   within.has_value() ? within->of : name) != outputs.end();
}

fe::DataType_t ComputeDType(const NodeWriter& writer,
                            std::initializer_list<std::string_view> roles) {
  const bool has_f64 = std::any_of(roles.begin(), roles.end(), [&](auto role) {
    return writer.Has(role) && writer.Spec(role).dtype == DType::kF64;
  });
  return has_f64 ? fe::DataType_t::DOUBLE : fe::DataType_t::FLOAT;
}

}  // namespace jax_cudnn
