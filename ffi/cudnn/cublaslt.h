// SPDX-License-Identifier: Apache-2.0
// The part of cuBLASLt's C interface that we call, declared here: building needs no
// header of CUDA's. tests/native/test_cublaslt.py compares it with NVIDIA's headers.

#ifndef JAX_CUDNN_CUBLASLT_H_
#define JAX_CUDNN_CUBLASLT_H_

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "cudnn/cudnn_library.h"

namespace jax_cudnn {

// cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t and
// cublasLtMatmulPreference_t; what is behind them is cuBLASLt's.
using CublasLtHandle = struct CublasLtContext*;
using CublasLtDescription = struct CublasLtDescriptionData*;
using CublasLtLayout = struct CublasLtLayoutData*;
using CublasLtPreference = struct CublasLtPreferenceData*;

// cublasLtMatmulAlgo_t: plain data, the same product of the same library again.
struct CublasLtAlgorithm {
  uint64_t data[8];
};

// cublasLtMatmulHeuristicResult_t.
struct CublasLtHeuristicResult {
  CublasLtAlgorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

// cudaDataType_t, cublasComputeType_t and cublasOperation_t.
enum CublasLtNumber : int32_t {
  kCudaF32 = 0,
  kCudaF16 = 2,
  kCudaBf16 = 14,
  kCudaF8E4m3 = 28,
  kCudaF8E5m2 = 29,
  kCublasComputeF32 = 68,
  kCublasComputeTf32 = 77,
  kCublasTranspose = 1,
};

// cublasLtMatmulDescAttributes_t.
enum class CublasLtMatmulAttribute : int {
  kTransposeA = 3,
  kTransposeB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kBiasBatchStride = 10,
  kAuxPointer = 11,
  kAuxLeading = 12,
  kAuxBatchStride = 13,
  kScaleA = 17,
  kScaleB = 18,
};

// cublasLtMatrixLayoutAttribute_t.
enum class CublasLtLayoutAttribute : int {
  kBatchCount = 5,
  kBatchStride = 6,
};

// cublasLtMatmulPreferenceAttributes_t.
enum class CublasLtPreferenceAttribute : int {
  kWorkspaceBytes = 1,
  kReductionSchemes = 3,
  kAlignmentA = 5,
  kAlignmentB = 6,
  kAlignmentC = 7,
  kAlignmentD = 8,
  // int64_t where cuBLAS 13.10 takes them, though its header says uint32_t.
  kAverageDepth = 13,
  kAverageRows = 14,
  kAverageColumns = 15,
};

// cublasLtMatmulAlgoConfigAttributes_t.
enum class CublasLtAlgorithmAttribute : int {
  kAlgorithm = 0,
  kTile = 1,
  kSplitK = 2,
  kReduction = 3,
  kSwizzle = 4,
  kCustom = 5,
  kStages = 6,
  kInner = 7,
  kCluster = 8,
};

// Bits of cublasLtEpilogue_t.
enum CublasLtEpilogue : uint32_t {
  kEpilogueNone = 1,
  kEpilogueRelu = 2,
  kEpilogueBias = 4,
  kEpilogueGelu = 32,
  kEpilogueGeluGradient = 64,
  kEpilogueAux = 128,
};

// CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of a sum are added up in f32.
inline constexpr uint32_t kCublasLtSumsInF32 = 2;

struct CublasLtFunctions {
  int (*create)(CublasLtHandle*) = nullptr;
  const char* (*get_status_string)(int) = nullptr;
  int (*description_create)(CublasLtDescription*, int compute, int scale) = nullptr;
  int (*description_destroy)(CublasLtDescription) = nullptr;
  int (*description_set)(CublasLtDescription, int, const void*, size_t) = nullptr;
  int (*layout_create)(CublasLtLayout*, int type, uint64_t rows, uint64_t columns,
                       int64_t leading) = nullptr;
  // Null before cuBLAS 13.1. The sizes are on the device, i32 for each group.
  int (*group_layout_create)(CublasLtLayout*, int type, int groups, const void* rows,
                             const void* columns, const void* leading) = nullptr;
  int (*layout_destroy)(CublasLtLayout) = nullptr;
  int (*layout_set)(CublasLtLayout, int, const void*, size_t) = nullptr;
  int (*preference_create)(CublasLtPreference*) = nullptr;
  int (*preference_destroy)(CublasLtPreference) = nullptr;
  int (*preference_set)(CublasLtPreference, int, const void*, size_t) = nullptr;
  int (*find)(CublasLtHandle, CublasLtDescription, CublasLtLayout a, CublasLtLayout b,
              CublasLtLayout c, CublasLtLayout d, CublasLtPreference, int wanted,
              CublasLtHeuristicResult*, int* found) = nullptr;
  int (*check)(CublasLtHandle, CublasLtDescription, CublasLtLayout a, CublasLtLayout b,
               CublasLtLayout c, CublasLtLayout d, const CublasLtAlgorithm*,
               CublasLtHeuristicResult*) = nullptr;
  int (*algorithm_get)(const CublasLtAlgorithm*, int, void*, size_t,
                       size_t* written) = nullptr;
  int (*matmul)(CublasLtHandle, CublasLtDescription, const void* alpha, const void* a,
                CublasLtLayout, const void* b, CublasLtLayout, const void* beta,
                const void* c, CublasLtLayout, void* d, CublasLtLayout,
                const CublasLtAlgorithm*, void* workspace, size_t workspace_bytes,
                CudaStream) = nullptr;
};

// The functions of the libcublasLt that `runtime` has opened. FAILED_PRECONDITION where
// it lacks one. Thread-safe, cheap after the first success.
StatusOr<const CublasLtFunctions*> LoadCublasLt(const CudnnRuntime& runtime);

// A handle of the current device, made at the first call and never destroyed (see
// handle_pool.h). It may serve several threads at once. Never call during a capture.
StatusOr<CublasLtHandle> CublasLtHandleHere(const CudnnRuntime& runtime);

// OK for 0, cuBLASLt's success; UNIMPLEMENTED where it does not support something;
// INTERNAL for the other errors.
Status CheckCublasLt(const CublasLtFunctions& cublaslt, int error, const char* call);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CUBLASLT_H_
