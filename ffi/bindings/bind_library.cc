// SPDX-License-Identifier: Apache-2.0
// Python's view of NVIDIA's libraries and of devices.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bindings/bindings.h"
#include "bindings/calls.h"
#include "cudnn/cuda_device.h"
#include "cudnn/cudnn_library.h"
#include "frontend/device_properties.h"

namespace nb = nanobind;

namespace jax_cudnn {
namespace {

nb::dict ToDict(const std::vector<OpenLibrary>& libraries) {
  nb::dict paths;
  for (const OpenLibrary& library : libraries) {
    paths[library.soname.c_str()] = library.path;
  }
  return paths;
}

nb::dict LoadLibraries() {
  const auto* runtime = Call("loading cuDNN", [] { return LoadCudnnRuntime(); });
  std::vector<OpenLibrary> libraries = runtime->companions;
  libraries.push_back(runtime->cudart);
  libraries.push_back(runtime->cudnn.library);
  return ToDict(libraries);
}

nb::dict CudnnVersion() {
  const auto* cudnn = Call("loading cuDNN", [] { return LoadCudnn(); });
  nb::dict result;
  result["version"] = cudnn->version;
  result["cuda_major"] = cudnn->cuda_major;
  result["path"] = cudnn->library.path;
  return result;
}

nb::dict GetDeviceInfo(int device) {
  const DeviceInfo info = Call("asking for a device", [&]() -> StatusOr<DeviceInfo> {
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    return QueryDevice(*runtime, device);
  });
  nb::dict result;
  result["name"] = info.name;
  result["sm_version"] = info.sm_version;
  result["sm_count"] = info.sm_count;
  return result;
}

std::string GetDeviceProperties(int device) {
  return Call("asking for a device", [&]() -> StatusOr<std::string> {
    ASSIGN_OR_RETURN(const CudnnRuntime* runtime, LoadCudnnRuntime());
    RETURN_IF_ERROR(CheckDevice(*runtime, device));
    return DescribeDevice(device);
  });
}

}  // namespace

void BindLibrary(nb::module_& m) {
  m.def("set_library_directories", SetLibraryDirectories, nb::arg("directories"));
  m.def("load_libraries", LoadLibraries);
  m.def("cudnn_version", CudnnVersion);

  m.def("device_info", GetDeviceInfo, nb::arg("device"));
  m.def("device_properties", GetDeviceProperties, nb::arg("device"));
}

}  // namespace jax_cudnn
