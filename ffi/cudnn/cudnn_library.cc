// SPDX-License-Identifier: Apache-2.0
// Opening libcudnn and its companions with dlopen.

#include "cudnn/cudnn_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

// The frontend declares this variable in its dynamic-loading mode and expects its user
// to define it.
namespace cudnn_frontend {
extern void* cudnn_dlhandle;
void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend

namespace jax_cudnn {
namespace {

// Device properties without a device need 9.8, which is also the oldest cuDNN that
// JAX 0.10 asks for.
constexpr int kOldestVersion = 90800;
constexpr int kNextMajorVersion = 100000;

constexpr char kCudnnSoname[] = "libcudnn.so.9";

struct State {
  // Guards all that follows; held while libraries are opened, which happens once.
  std::mutex mutex;
  std::vector<std::string> directories;
  std::unique_ptr<CudnnLibrary> cudnn;
  std::unique_ptr<CudnnRuntime> runtime;
  // Set once `runtime` is complete; read without the mutex.
  std::atomic<const CudnnRuntime*> published{nullptr};
};

State& GlobalState() {
  // Leaked: handlers may still run while static objects are being destroyed.
  static auto& state = *new State;
  return state;
}

std::string PathOf(void* handle, const std::string& fallback) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0 &&
      map != nullptr && map->l_name != nullptr && map->l_name[0] != '\0') {
    return map->l_name;
  }
  return fallback;
}

std::string LastLoaderError() {
  const char* error = dlerror();
  return error == nullptr ? "unknown loader error" : error;
}

// Opens a library: the loaded copy, else the directories', else the loader's choice.
StatusOr<OpenLibrary> Open(const std::string& soname,
                           const std::vector<std::string>& directories) {
  constexpr int kFlags = RTLD_NOW | RTLD_GLOBAL;
  if (void* handle = dlopen(soname.c_str(), kFlags | RTLD_NOLOAD)) {
    return OpenLibrary{soname, PathOf(handle, soname), handle};
  }
  std::string attempts;
  for (const std::string& directory : directories) {
    const std::string path = directory + "/" + soname;
    if (access(path.c_str(), R_OK) != 0) continue;
    if (void* handle = dlopen(path.c_str(), kFlags)) {
      return OpenLibrary{soname, PathOf(handle, path), handle};
    }
    attempts += "\n  - " + LastLoaderError();
  }
  if (void* handle = dlopen(soname.c_str(), kFlags)) {
    return OpenLibrary{soname, PathOf(handle, soname), handle};
  }
  attempts += "\n  - " + LastLoaderError();
  std::string places = "the loader's path";
  for (const std::string& directory : directories) places += ", " + directory;
  return FailedPrecondition(
      "Cannot open " + soname +
      ", which jax_cudnn needs. It is not loaded, and was looked for in " + places +
      ". Install jax_cudnn with its extra cuda12 or cuda13, or put the library's "
      "directory on LD_LIBRARY_PATH." +
      attempts);
}

StatusOr<std::unique_ptr<CudnnLibrary>> OpenCudnn(
    const std::vector<std::string>& directories) {
  auto cudnn = std::make_unique<CudnnLibrary>();
  ASSIGN_OR_RETURN(cudnn->library, Open(kCudnnSoname, directories));
  const OpenLibrary& library = cudnn->library;
  CudnnFunctions& functions = cudnn->functions;
  RETURN_IF_ERROR(Resolve(library, "cudnnGetVersion", functions.get_version));
  cudnn->version = static_cast<int>(functions.get_version());
  if (cudnn->version < kOldestVersion || cudnn->version >= kNextMajorVersion) {
    return FailedPrecondition("cuDNN " + VersionText(cudnn->version) + " (" +
                              library.path + ") cannot be used: jax_cudnn needs " +
                              VersionText(kOldestVersion) +
                              " or a later 9.x. Upgrade nvidia-cudnn-cu12 or "
                              "nvidia-cudnn-cu13.");
  }
  RETURN_IF_ERROR(Resolve(library, "cudnnCreate", functions.create));
  RETURN_IF_ERROR(Resolve(library, "cudnnSetStream", functions.set_stream));
  RETURN_IF_ERROR(Resolve(library, "cudnnGetErrorString", functions.get_error_string));
  RETURN_IF_ERROR(
      Resolve(library, "cudnnGetLastErrorString", functions.get_last_error_string));
  RETURN_IF_ERROR(
      Resolve(library, "cudnnGetCudartVersion", functions.get_cudart_version));
  cudnn->cuda_major = static_cast<int>(functions.get_cudart_version() / 1000);
  return cudnn;
}

int CublasLtVersion(const OpenLibrary& cublaslt) {
  size_t (*version)() = nullptr;
  return Resolve(cublaslt, "cublasLtGetVersion", version).ok()
             ? static_cast<int>(version())
             : 0;
}

int NvrtcVersion(const OpenLibrary& nvrtc) {
  int (*version)(int*, int*) = nullptr;
  int major = 0;
  int minor = 0;
  if (!Resolve(nvrtc, "nvrtcVersion", version).ok() || version(&major, &minor) != 0) {
    return 0;
  }
  return major * 1000 + minor * 10;
}

// Opens the library that libnvrtc opens by name when it first compiles. NVIDIA's wheels
// keep it beside libnvrtc, where the loader does not look (libnvrtc 13.0 has no
// RUNPATH), and every runtime-compiled plan would fail. Not an error when absent:
// another build of libnvrtc may do without.
void OpenNvrtcBuiltins(const OpenLibrary& nvrtc, int version,
                       const std::vector<std::string>& directories,
                       std::vector<OpenLibrary>& companions) {
  if (version == 0) return;
  std::vector<std::string> places = {nvrtc.path.substr(0, nvrtc.path.rfind('/'))};
  places.insert(places.end(), directories.begin(), directories.end());
  auto builtins = Open("libnvrtc-builtins.so." + CudaVersionText(version), places);
  if (builtins.ok()) companions.push_back(std::move(*builtins));
}

StatusOr<std::unique_ptr<CudnnRuntime>> OpenRuntime(
    const CudnnLibrary& cudnn, const std::vector<std::string>& directories) {
  auto runtime = std::make_unique<CudnnRuntime>();
  runtime->cudnn = cudnn;
  // The runtime and math libraries of the CUDA that this cuDNN was built for: a
  // process may well have another major's libraries within reach.
  const std::string major = std::to_string(cudnn.cuda_major);
  ASSIGN_OR_RETURN(runtime->cudart, Open("libcudart.so." + major, directories));
  ASSIGN_OR_RETURN(const OpenLibrary driver, Open("libcuda.so.1", directories));
  ASSIGN_OR_RETURN(runtime->cublaslt, Open("libcublasLt.so." + major, directories));
  ASSIGN_OR_RETURN(const OpenLibrary nvrtc, Open("libnvrtc.so." + major, directories));
  runtime->companions = {driver, runtime->cublaslt, nvrtc};
  runtime->cublaslt_version = CublasLtVersion(runtime->cublaslt);
  runtime->nvrtc_version = NvrtcVersion(nvrtc);
  OpenNvrtcBuiltins(nvrtc, runtime->nvrtc_version, directories, runtime->companions);
  const OpenLibrary& cudart = runtime->cudart;
  CudaFunctions& cuda = runtime->cuda;
  RETURN_IF_ERROR(Resolve(cudart, "cudaGetDevice", cuda.get_device));
  RETURN_IF_ERROR(Resolve(cudart, "cudaSetDevice", cuda.set_device));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGetDeviceCount", cuda.get_device_count));
  RETURN_IF_ERROR(Resolve(cudart, "cudaDeviceGetAttribute", cuda.device_get_attribute));
  RETURN_IF_ERROR(Resolve(cudart, "cudaDriverGetVersion", cuda.driver_get_version));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGetErrorString", cuda.get_error_string));
  RETURN_IF_ERROR(Resolve(cudart, "cudaStreamCreateWithFlags", cuda.stream_create));
  RETURN_IF_ERROR(Resolve(cudart, "cudaStreamDestroy", cuda.stream_destroy));
  RETURN_IF_ERROR(Resolve(cudart, "cudaStreamSynchronize", cuda.stream_synchronize));
  RETURN_IF_ERROR(Resolve(cudart, "cudaStreamBeginCapture", cuda.stream_begin_capture));
  RETURN_IF_ERROR(Resolve(cudart, "cudaStreamEndCapture", cuda.stream_end_capture));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGraphGetNodes", cuda.graph_get_nodes));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGraphNodeGetType", cuda.graph_node_get_type));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGraphDestroyNode", cuda.graph_destroy_node));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGraphInstantiate", cuda.graph_instantiate));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGraphExecDestroy", cuda.graph_exec_destroy));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGraphDestroy", cuda.graph_destroy));
  RETURN_IF_ERROR(Resolve(cudart, "cudaGetLastError", cuda.get_last_error));
  RETURN_IF_ERROR(Resolve(cudart, "cudaMemcpyAsync", cuda.memcpy_async));
  RETURN_IF_ERROR(Resolve(cudart, "cudaMemsetAsync", cuda.memset_async));
  RETURN_IF_ERROR(Resolve(cudart, "cudaEventCreate", cuda.event_create));
  RETURN_IF_ERROR(Resolve(cudart, "cudaEventDestroy", cuda.event_destroy));
  RETURN_IF_ERROR(Resolve(cudart, "cudaEventRecord", cuda.event_record));
  RETURN_IF_ERROR(Resolve(cudart, "cudaEventSynchronize", cuda.event_synchronize));
  RETURN_IF_ERROR(Resolve(cudart, "cudaEventElapsedTime", cuda.event_elapsed_time));
  // What is not there is asked for by nobody.
  static_cast<void>(Resolve(cudart, "cudaLibraryLoadData", cuda.library_load));
  static_cast<void>(Resolve(cudart, "cudaLibraryGetKernel", cuda.library_get_kernel));
  static_cast<void>(Resolve(cudart, "cudaLaunchKernel", cuda.launch_kernel));
  RETURN_IF_ERROR(Resolve(driver, "cuDeviceGet", cuda.driver_device_get));
  RETURN_IF_ERROR(Resolve(driver, "cuDeviceGetName", cuda.driver_device_get_name));
  return runtime;
}

Status EnsureCudnn(State& state) {
  if (state.cudnn == nullptr) {
    ASSIGN_OR_RETURN(state.cudnn, OpenCudnn(state.directories));
  }
  return {};
}

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

}  // namespace

void SetLibraryDirectories(std::vector<std::string> directories) {
  State& state = GlobalState();
  const std::scoped_lock lock(state.mutex);
  state.directories = std::move(directories);
}

StatusOr<const CudnnLibrary*> LoadCudnn() {
  State& state = GlobalState();
  const std::scoped_lock lock(state.mutex);
  RETURN_IF_ERROR(EnsureCudnn(state));
  return static_cast<const CudnnLibrary*>(state.cudnn.get());
}

StatusOr<const CudnnRuntime*> LoadCudnnRuntime() {
  if (const CudnnRuntime* runtime = LoadedCudnnRuntime()) return runtime;
  State& state = GlobalState();
  const std::scoped_lock lock(state.mutex);
  if (state.runtime == nullptr) {
    RETURN_IF_ERROR(EnsureCudnn(state));
    ASSIGN_OR_RETURN(state.runtime, OpenRuntime(*state.cudnn, state.directories));
    cudnn_frontend::cudnn_dlhandle = state.cudnn->library.handle;
    state.published.store(state.runtime.get(), std::memory_order_release);
  }
  return static_cast<const CudnnRuntime*>(state.runtime.get());
}

StatusOr<void*> Lookup(const OpenLibrary& library, const char* name) {
  if (void* function = dlsym(library.handle, name)) return function;
  return FailedPrecondition(library.path + " has no function " + name);
}

const CudnnRuntime* LoadedCudnnRuntime() {
  return GlobalState().published.load(std::memory_order_acquire);
}

void* OpenForFrontend(const char* name, int flags) {
  const std::string_view wanted = name == nullptr ? std::string_view() : name;
  const CudnnRuntime* runtime = LoadedCudnnRuntime();
  if (runtime == nullptr) return dlopen(name, flags);
  if (wanted == runtime->cudart.soname) return runtime->cudart.handle;
  for (const OpenLibrary& companion : runtime->companions) {
    if (wanted == companion.soname) return companion.handle;
  }
  // The frontend tries every CUDA major that it knows and warns about the second.
  if (StartsWith(wanted, "libcudart.so")) return nullptr;
  return dlopen(name, flags);
}

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
         "." + std::to_string(version % 100);
}

std::string CudaVersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace jax_cudnn
