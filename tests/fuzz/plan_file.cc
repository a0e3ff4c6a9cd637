// SPDX-License-Identifier: Apache-2.0
// Reads any bytes as a plan file, and as the contents of one whose checksum is right:
// the key with the graph and the request in it, and what the plan says of itself.

#include "keeping/plan_file.h"

#include <algorithm>
#include <string>

#include "candidates/plan_request.h"
#include "fuzzing.h"
#include "graph/graph_spec.h"
#include "plans/plan_record.h"

namespace jax_cudnn {
namespace {

void Check(const Status& status) {
  if (!status.ok()) RequireRefusal(status);
}

void Use(const PlanFile& file) {
  std::string_view payload = file.payload;
  const auto record = TakePlanRecord(payload);
  Check(record.status());
  if (record.ok()) {
    const std::string again = WritePlanRecord(record->candidate, record->failures);
    std::string_view rest = again;
    Require(TakePlanRecord(rest).ok() && rest.empty(), "a record comes back");
  }
  const auto key = ReadKey(file.key);
  if (!key.ok()) {
    RequireRefusal(key.status());
    return;
  }
  const auto again = ReadKey(WriteKey(*key));
  Require(again.ok() && CheckSameMachine(*again, *key).ok(), "a key comes back");
  const Status same = CheckSameMachine(*key, LocalKey());
  Require(same.ok() || same.code() == StatusCode::kFailedPrecondition,
          "another machine is FAILED_PRECONDITION");
  Check(ParseGraph(key->graph).status());
  Check(ParsePlanRequest(key->request).status());
}

}  // namespace
}  // namespace jax_cudnn

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace)
  const std::string_view bytes = Text(data, size);
  const auto file = ReadPlanFile(bytes);
  if (file.ok()) {
    Require(WritePlanFile(*file) == bytes, "a plan file comes back");
    Use(*file);
  } else {
    RequireRefusal(file.status());
  }
  // The fuzzer does not guess a checksum: a key, a zero byte and a payload are enough.
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  const std::string key(bytes.substr(0, end));
  const std::string payload(bytes.substr(std::min(end + 1, bytes.size())));
  const auto made = ReadPlanFile(WritePlanFile({key, payload}));
  Require(made.ok() && made->key == key && made->payload == payload,
          "what was written is read");
  Use(*made);
  return 0;
}
