// SPDX-License-Identifier: Apache-2.0
// Finds and opens libcudnn and what it needs, at run time, once per process.
//
// The extension links to none of them: it must import on a machine that has neither,
// and use the copies that JAX has loaded where there are any.

#ifndef JAX_CUDNN_CUDNN_LIBRARY_H_
#define JAX_CUDNN_CUDNN_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

// The opaque types behind cudnnHandle_t and cudaStream_t, so that only the files that
// talk to the frontend include NVIDIA's headers.
struct cudnnContext;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphExec_st;
struct CUgraphNode_st;
struct CUkern_st;
struct CUlib_st;
struct CUstream_st;

namespace jax_cudnn {

using CudnnHandle = cudnnContext*;
using CudaEvent = CUevent_st*;
using CudaGraph = CUgraph_st*;
using CudaGraphExec = CUgraphExec_st*;
using CudaGraphNode = CUgraphNode_st*;
using CudaKernel = CUkern_st*;
using CudaLibrary = CUlib_st*;
using CudaStream = CUstream_st*;

// dim3.
struct CudaDim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// One shared library, and the path of the file it was opened from.
struct OpenLibrary {
  std::string soname;
  std::string path;
  void* handle = nullptr;
};

// The address of a function in an open library; FAILED_PRECONDITION without one.
StatusOr<void*> Lookup(const OpenLibrary& library, const char* name);

// Looks a function up by its name.
template <typename Function>
Status Resolve(const OpenLibrary& library, const char* name, Function*& function) {
  ASSIGN_OR_RETURN(void* found, Lookup(library, name));
  function = reinterpret_cast<Function*>(found);
  return {};
}

// The functions of libcudnn that we call ourselves, by their C signatures.
struct CudnnFunctions {
  int (*create)(CudnnHandle*) = nullptr;
  int (*set_stream)(CudnnHandle, CudaStream) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  void (*get_last_error_string)(char*, size_t) = nullptr;
  size_t (*get_version)() = nullptr;
  size_t (*get_cudart_version)() = nullptr;
};

// The functions of the CUDA runtime and driver that we call ourselves.
struct CudaFunctions {
  int (*get_device)(int*) = nullptr;
  int (*set_device)(int) = nullptr;
  int (*get_device_count)(int*) = nullptr;
  int (*device_get_attribute)(int*, int, int) = nullptr;
  int (*driver_get_version)(int*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  int (*stream_create)(CudaStream*, unsigned) = nullptr;
  int (*stream_destroy)(CudaStream) = nullptr;
  int (*stream_synchronize)(CudaStream) = nullptr;
  int (*stream_begin_capture)(CudaStream, int) = nullptr;
  int (*stream_end_capture)(CudaStream, CudaGraph*) = nullptr;
  int (*graph_get_nodes)(CudaGraph, CudaGraphNode*, size_t*) = nullptr;
  int (*graph_node_get_type)(CudaGraphNode, int*) = nullptr;
  int (*graph_destroy_node)(CudaGraphNode) = nullptr;
  int (*graph_instantiate)(CudaGraphExec*, CudaGraph, uint64_t) = nullptr;
  int (*graph_exec_destroy)(CudaGraphExec) = nullptr;
  int (*graph_destroy)(CudaGraph) = nullptr;
  int (*get_last_error)() = nullptr;
  int (*memcpy_async)(void*, const void*, size_t, int, CudaStream) = nullptr;
  int (*memset_async)(void*, int, size_t, CudaStream) = nullptr;
  int (*event_create)(CudaEvent*) = nullptr;
  int (*event_destroy)(CudaEvent) = nullptr;
  int (*event_record)(CudaEvent, CudaStream) = nullptr;
  int (*event_synchronize)(CudaEvent) = nullptr;
  int (*event_elapsed_time)(float*, CudaEvent, CudaEvent) = nullptr;
  // Null before CUDA 12.8.
  int (*library_load)(CudaLibrary*, const void* code, void*, void**, unsigned, void*,
                      void**, unsigned) = nullptr;
  int (*library_get_kernel)(CudaKernel*, CudaLibrary, const char* name) = nullptr;
  int (*launch_kernel)(CudaKernel, CudaDim3 grid, CudaDim3 block, void** arguments,
                       size_t shared_bytes, CudaStream) = nullptr;
  int (*driver_device_get)(int*, int) = nullptr;
  int (*driver_device_get_name)(char*, int, int) = nullptr;
};

// libcudnn alone: enough to ask for its version.
struct CudnnLibrary {
  OpenLibrary library;
  CudnnFunctions functions;
  int version = 0;     // as cudnnGetVersion gives it: 91900 is 9.19.0
  int cuda_major = 0;  // the CUDA that it was built for
};

// libcudnn and all that it opens by itself while it plans and runs.
struct CudnnRuntime {
  CudnnLibrary cudnn;
  CudaFunctions cuda;
  OpenLibrary cudart;
  OpenLibrary cublaslt;
  std::vector<OpenLibrary> companions;  // libcuda, libcublasLt, libnvrtc and its own
  // Of the companions whose code is in plans; 0 where they do not say.
  int cublaslt_version = 0;  // as cuBLAS counts it: 130100 is 13.1.0
  int nvrtc_version = 0;     // as CUDA counts it: 13000 is 13.0; it tells no more
};

// Where to look for libraries that are not loaded yet, before the loader's own path.
// Thread-safe; has no effect on what is open already.
void SetLibraryDirectories(std::vector<std::string> directories);

// Opens libcudnn. Thread-safe; the result lives as long as the process, and a failure
// (FAILED_PRECONDITION, with the places looked at) can be tried again.
StatusOr<const CudnnLibrary*> LoadCudnn();

// Opens libcudnn with its companions and gives them to the frontend. cuDNN would abort
// the process where libcublasLt is missing, and fail obscurely without the others.
// Thread-safe, cheap after the first success.
StatusOr<const CudnnRuntime*> LoadCudnnRuntime();

// What the last LoadCudnnRuntime opened, or null.
const CudnnRuntime* LoadedCudnnRuntime();

// What dlopen would answer the frontend: our handle for the libraries that we chose,
// null for the other CUDA major's runtime. See frontend.h.
void* OpenForFrontend(const char* name, int flags);

// "9.19.0" for 91900.
std::string VersionText(int version);

// "13.0" for 13000.
std::string CudaVersionText(int version);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_CUDNN_LIBRARY_H_
