// SPDX-License-Identifier: Apache-2.0
// The form of a plan file: what the plan was made for and with, the plan, a checksum.
//
// Knows neither folders nor cuDNN: what a plan's bytes mean is plan_bytes.cc's to say.

#ifndef JAX_CUDNN_PLAN_FILE_H_
#define JAX_CUDNN_PLAN_FILE_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace jax_cudnn {

// All that a plan depends on. A plan serves where every field is equal.
struct PlanKey {
  std::string graph;  // canonical text
  std::string request;
  std::string gpu;  // the device's name
  int64_t sm_version = 0;
  int64_t sm_count = 0;
  int64_t cudnn_version = 0;     // as cuDNN counts it
  int64_t cuda_major = 0;        // the CUDA that cuDNN was built for
  int64_t cublaslt_version = 0;  // of the library that cuDNN's engines call
  int64_t nvrtc_version = 0;     // of the compiler of cuDNN's engines
  int64_t driver_version = 0;    // the CUDA that the driver serves; 0: not known
  std::string cpu;               // cuDNN writes host structures as they lie in memory
  std::string frontend_version;
  std::string builder;   // a digest of this extension's sources: they write the graph
  std::string settings;  // environment variables that change what cuDNN plans
};

// The fields that say with what the calling process plans; those of the graph and the
// device are the caller's to fill in.
PlanKey LocalKey();

// One text per key; equal texts are equal keys.
std::string WriteKey(const PlanKey& key);
StatusOr<PlanKey> ReadKey(std::string_view text);

// FAILED_PRECONDITION naming the fields in which a plan's key differs from that of the
// place where it is to run. Graph and request are not compared, and neither are drivers
// if one is not known.
Status CheckSameMachine(const PlanKey& made, const PlanKey& here);

struct PlanFile {
  std::string key;  // WriteKey's
  std::string payload;
};

std::string WritePlanFile(const PlanFile& file);
// INVALID_ARGUMENT for bytes that are not what WritePlanFile wrote: any change, also
// of one bit, is found.
StatusOr<PlanFile> ReadPlanFile(std::string_view bytes);

// 64 bits; two texts of one length that differ in one byte only never share
// them. Not cryptographic.
uint64_t Digest(std::string_view bytes);

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_PLAN_FILE_H_
