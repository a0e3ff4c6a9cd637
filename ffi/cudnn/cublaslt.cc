// SPDX-License-Identifier: Apache-2.0
// Looking cuBLASLt's functions up, and keeping a handle for each device.

#include "cudnn/cublaslt.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "cudnn/cuda_device.h"

namespace jax_cudnn {
namespace {

constexpr int kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED
constexpr int kInvalidValue = 7;   // CUBLAS_STATUS_INVALID_VALUE
constexpr int kArchMismatch = 8;   // CUBLAS_STATUS_ARCH_MISMATCH

struct State {
  std::mutex mutex;  // held while functions are looked up and handles are made
  std::unique_ptr<CublasLtFunctions> functions;
  // Set once `functions` is complete; read without the mutex.
  std::atomic<const CublasLtFunctions*> published{nullptr};
  std::array<std::atomic<CublasLtHandle>, kMaxDevices> handles{};
};

State& GlobalState() {
  static auto& state = *new State;  // leaked, as in cudnn_library.cc
  return state;
}

StatusOr<std::unique_ptr<CublasLtFunctions>> ResolveAll(const OpenLibrary& library) {
  auto found = std::make_unique<CublasLtFunctions>();
  const auto resolve = [&](const char* name, auto*& function) {
    return Resolve(library, name, function);
  };
  RETURN_IF_ERROR(resolve("cublasLtCreate", found->create));
  RETURN_IF_ERROR(resolve("cublasLtGetStatusString", found->get_status_string));
  RETURN_IF_ERROR(resolve("cublasLtMatmulDescCreate", found->description_create));
  RETURN_IF_ERROR(resolve("cublasLtMatmulDescDestroy", found->description_destroy));
  RETURN_IF_ERROR(resolve("cublasLtMatmulDescSetAttribute", found->description_set));
  RETURN_IF_ERROR(resolve("cublasLtMatrixLayoutCreate", found->layout_create));
  RETURN_IF_ERROR(resolve("cublasLtMatrixLayoutDestroy", found->layout_destroy));
  RETURN_IF_ERROR(resolve("cublasLtMatrixLayoutSetAttribute", found->layout_set));
  RETURN_IF_ERROR(resolve("cublasLtMatmulPreferenceCreate", found->preference_create));
  RETURN_IF_ERROR(
      resolve("cublasLtMatmulPreferenceDestroy", found->preference_destroy));
  RETURN_IF_ERROR(
      resolve("cublasLtMatmulPreferenceSetAttribute", found->preference_set));
  RETURN_IF_ERROR(resolve("cublasLtMatmulAlgoGetHeuristic", found->find));
  RETURN_IF_ERROR(resolve("cublasLtMatmulAlgoCheck", found->check));
  RETURN_IF_ERROR(
      resolve("cublasLtMatmulAlgoConfigGetAttribute", found->algorithm_get));
  RETURN_IF_ERROR(resolve("cublasLtMatmul", found->matmul));
  // What is not there is asked for by nobody.
  static_cast<void>(
      resolve("cublasLtGroupedMatrixLayoutCreate", found->group_layout_create));
  return found;
}

}  // namespace

StatusOr<const CublasLtFunctions*> LoadCublasLt(const CudnnRuntime& runtime) {
  State& state = GlobalState();
  if (const auto* known = state.published.load(std::memory_order_acquire)) {
    return known;
  }
  const std::scoped_lock lock(state.mutex);
  if (state.functions == nullptr) {
    ASSIGN_OR_RETURN(state.functions, ResolveAll(runtime.cublaslt));
    state.published.store(state.functions.get(), std::memory_order_release);
  }
  return static_cast<const CublasLtFunctions*>(state.functions.get());
}

StatusOr<CublasLtHandle> CublasLtHandleHere(const CudnnRuntime& runtime) {
  ASSIGN_OR_RETURN(const CublasLtFunctions* cublaslt, LoadCublasLt(runtime));
  int device = 0;
  RETURN_IF_ERROR(
      CheckCuda(runtime, runtime.cuda.get_device(&device), "cudaGetDevice"));
  if (device < 0 || device >= kMaxDevices) {
    return Internal("device " + std::to_string(device) + " is not one of ours");
  }
  State& state = GlobalState();
  auto& place = state.handles[static_cast<size_t>(device)];
  if (CublasLtHandle handle = place.load(std::memory_order_acquire)) return handle;
  const std::scoped_lock lock(state.mutex);
  CublasLtHandle handle = place.load(std::memory_order_relaxed);
  if (handle == nullptr) {
    RETURN_IF_ERROR(
        CheckCublasLt(*cublaslt, cublaslt->create(&handle), "cublasLtCreate"));
    place.store(handle, std::memory_order_release);
  }
  return handle;
}

Status CheckCublasLt(const CublasLtFunctions& cublaslt, int error, const char* call) {
  if (error == 0) return {};
  const std::string text =
      std::string(call) + " failed: " + cublaslt.get_status_string(error);
  const bool is_refused =
      error == kNotSupported || error == kInvalidValue || error == kArchMismatch;
  return is_refused ? Unimplemented(text) : Internal(text);
}

}  // namespace jax_cudnn
