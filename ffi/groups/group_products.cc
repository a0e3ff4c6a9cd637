// SPDX-License-Identifier: Apache-2.0
// Reading the sizes of the groups, launching their matmuls.

#include "groups/group_products.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "base/log.h"
#include "candidates/attempt.h"
#include "cudnn/cuda_device.h"
#include "frontend/engine_names.h"
#include "frontend/frontend_status.h"

namespace jax_cudnn {
namespace {

constexpr std::string_view kCompiles = "RUNTIME_COMPILATION";

constexpr int kDeviceToHost = 2;    // cudaMemcpyDeviceToHost
constexpr int kDeviceToDevice = 3;  // cudaMemcpyDeviceToDevice

// A plan is made for each number of rows. So that there are few, products are of
// multiples of 64.
constexpr int64_t kRowsPerStep = 64;

constexpr int64_t kAlignment = 256;

int64_t RoundedUp(int64_t size, int64_t unit) {
  return (size + unit - 1) / unit * unit;
}

// Builds the candidate that `pin` names for a matmul, or another one where that does
// not take it, and notes its workspace.
StatusOr<std::unique_ptr<LaunchableGraph>> BuildMatmul(const GraphSpec& matmul,
                                                       const PlanRequest& pin,
                                                       const PlanTarget& target,
                                                       int64_t& workspace_bytes) {
  PlanRequest any;
  any.deterministic = pin.deterministic;
  for (const PlanRequest& request : {pin, any}) {
    auto attempt = Attempt::Make(matmul, request, target, /*variant=*/0);
    if (!attempt.ok()) {
      if (attempt.status().code() == StatusCode::kUnimplemented) continue;
      return attempt.status();
    }
    for (const int64_t i : attempt->indices()) {
      ASSIGN_OR_RETURN(Candidate candidate, attempt->Describe(i));
      if (!candidate.refusal.empty()) continue;
      if (!GroupProducts::RefusalOf(candidate).empty()) continue;
      RETURN_IF_ERROR(attempt->Build(i, candidate));
      if (!candidate.is_built) continue;
      if (const auto error = attempt->graph()->build_plans(); error.is_bad()) {
        return Internal(Message(error));
      }
      workspace_bytes = candidate.workspace_bytes;
      return LaunchableGraph::Make(matmul, attempt->graph());
    }
  }
  return Unimplemented("cuDNN has no engine that is not compiled for the matmul " +
                       ListText(matmul.Tensor("a").dims) + " x " +
                       ListText(matmul.Tensor("b").dims));
}

}  // namespace

bool GroupProducts::Covers(const GraphSpec& graph) {
  return HasGroupSizes(graph) && graph.nodes.front().inputs.count("starts") == 0;
}

GraphSpec GroupProducts::Matmul(const Product& product, int64_t rows) {
  constexpr std::array<std::string_view, 3> kRoles = {"a", "b", "output"};
  GraphSpec graph;
  NodeSpec node;
  node.kind = "matmul";
  for (size_t i = 0; i < kRoles.size(); ++i) {
    const std::string name(kRoles[i]);
    TensorSpec tensor = product[i].tensor;
    tensor.name = name;
    if (const int axis = product[i].rows_axis; axis >= 0) {
      tensor.dims[static_cast<size_t>(axis)] = rows;
    }
    graph.tensors.push_back(std::move(tensor));
    const bool is_result = i == 2;
    (is_result ? node.outputs : node.inputs).emplace(name, name);
    (is_result ? graph.outputs : graph.inputs).push_back(name);
  }
  graph.nodes.push_back(std::move(node));
  return graph;
}

int64_t GroupProducts::TypicalRows(const GroupLayout& layout) {
  const int64_t rows = layout.rows / std::max<int64_t>(layout.groups, 1);
  return std::min(std::max(rows / kRowsPerStep, int64_t{1}) * kRowsPerStep,
                  layout.rows);
}

StatusOr<GraphSpec> GroupProducts::TypicalMatmul(const GraphSpec& graph) {
  ASSIGN_OR_RETURN(const GroupLayout layout, ReadGroupLayout(graph));
  return Matmul(layout.products.front(), TypicalRows(layout));
}

std::string_view GroupProducts::RefusalOf(const Candidate& candidate) {
  const auto& notes = candidate.behavior_notes;
  if (std::find(notes.begin(), notes.end(), kCompiles) != notes.end()) {
    return "it would be compiled for every number of rows that a group has";
  }
  // Its place among others is that for one number of rows.
  return HasUnknownKnob(candidate.knobs) ? "it cannot be asked for by name" : "";
}

StatusOr<std::unique_ptr<GroupProducts>> GroupProducts::Make(const GraphSpec& graph,
                                                             const PlanTarget& target,
                                                             Candidate& candidate) {
  ASSIGN_OR_RETURN(GroupLayout layout, ReadGroupLayout(graph));
  ASSIGN_OR_RETURN(PlanRequest request, ParsePlanRequest(candidate.request));
  // The workspace is that of the greediest of these.
  const std::set<int64_t> sizes = {TypicalRows(layout), kRowsPerStep,
                                   RoundedUp(layout.rows, kRowsPerStep)};
  std::unique_ptr<GroupProducts> products(
      new GroupProducts(std::move(layout), std::move(request), target));
  for (size_t i = 0; i < products->layout_.products.size(); ++i) {
    for (const int64_t rows : sizes) {
      int64_t bytes = 0;
      ASSIGN_OR_RETURN(auto launch,
                       BuildMatmul(Matmul(products->layout_.products[i], rows),
                                   products->request_, target, bytes));
      products->launches_.emplace(std::make_pair(i, rows), std::move(launch));
      products->engine_bytes_ = std::max(products->engine_bytes_, bytes);
    }
  }
  products->engine_bytes_ = RoundedUp(products->engine_bytes_, kAlignment);
  candidate.workspace_bytes = products->engine_bytes_;
  for (const Product& product : products->layout_.products) {
    if (product[2].rows_axis >= 0) continue;
    candidate.workspace_bytes +=
        products->CopyBytes(product[0]) + products->CopyBytes(product[1]);
  }
  return products;
}

StatusOr<const LaunchableGraph*> GroupProducts::LaunchOf(size_t product, int64_t rows,
                                                         CudnnHandle handle) const {
  const DeferredLog deferred;  // cuDNN may log while it plans
  const std::scoped_lock lock(mutex_);
  auto& launch = launches_[{product, rows}];
  if (launch == nullptr) {
    PlanTarget target = target_;
    target.handle = handle;
    int64_t bytes = 0;
    ASSIGN_OR_RETURN(launch, BuildMatmul(Matmul(layout_.products[product], rows),
                                         request_, target, bytes));
    if (bytes > engine_bytes_) {
      launch = nullptr;
      return Internal("the product of " + std::to_string(rows) + " rows needs " +
                      std::to_string(bytes) + " bytes of workspace, and others " +
                      std::to_string(engine_bytes_));
    }
  }
  return static_cast<const LaunchableGraph*>(launch.get());
}

char* GroupProducts::Call::At(const Part& part, int64_t place) const {
  void* const start = (part.memory.is_result ? results : operands)[part.memory.index];
  return static_cast<char*>(start) + place * part.step_bytes;
}

Status GroupProducts::Launch(const Call& call, size_t product, int64_t rows,
                             const std::array<char*, 3>& memory) const {
  ASSIGN_OR_RETURN(const LaunchableGraph* launch, LaunchOf(product, rows, call.handle));
  std::array<void*, 3> pointers{memory[0], memory[1], memory[2]};
  return launch->Execute(call.handle, call.stream, pointers.data(), &pointers[2],
                         call.workspace);
}

// More rows than the group has may be computed: the next groups write over them, and
// zeros follow the last one.
Status GroupProducts::RunRows(const Call& call, size_t product,
                              const Group& group) const {
  const Product& parts = layout_.products[product];
  const auto run = [&](int64_t first, int64_t rows) {
    std::array<char*, 3> memory{};
    for (size_t i = 0; i < memory.size(); ++i) {
      memory[i] = call.At(parts[i], parts[i].rows_axis < 0 ? group.number : first);
    }
    return Launch(call, product, rows, memory);
  };
  const int64_t rounded = RoundedUp(group.rows, kRowsPerStep);
  if (group.first + rounded <= layout_.rows) return run(group.first, rounded);
  // At the end of the array, the last rows are computed by themselves, some of them a
  // second time.
  const int64_t whole = rounded - kRowsPerStep;
  if (whole == 0) return run(group.first, group.rows);
  RETURN_IF_ERROR(run(group.first, whole));
  return run(group.first + group.rows - kRowsPerStep, kRowsPerStep);
}

int64_t GroupProducts::CopyBytes(const Part& part) const {
  const int64_t rows = RoundedUp(layout_.rows, kRowsPerStep);
  return RoundedUp(part.step_bytes * rows, kAlignment);
}

// Rows of the next group must not be added up. Zeros take their place in a copy.
Status GroupProducts::RunSum(const Call& call, size_t product,
                             const Group& group) const {
  const Product& parts = layout_.products[product];
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  std::array<char*, 3> memory{call.At(parts[0], group.first),
                              call.At(parts[1], group.first),
                              call.At(parts[2], group.number)};
  const int64_t rounded = RoundedUp(group.rows, kRowsPerStep);
  if (rounded == group.rows) return Launch(call, product, rounded, memory);
  char* copy = call.copies;
  for (size_t i = 0; i < 2; ++i) {
    const int64_t step = parts[i].step_bytes;
    const auto bytes = static_cast<size_t>(group.rows * step);
    RETURN_IF_ERROR(CheckCuda(
        runtime,
        runtime.cuda.memcpy_async(copy, memory[i], bytes, kDeviceToDevice, call.stream),
        "cudaMemcpyAsync"));
    const auto rest = static_cast<size_t>((rounded - group.rows) * step);
    RETURN_IF_ERROR(CheckCuda(
        runtime, runtime.cuda.memset_async(copy + bytes, 0, rest, call.stream),
        "cudaMemsetAsync"));
    memory[i] = copy;
    copy += CopyBytes(parts[i]);
  }
  return Launch(call, product, rounded, memory);
}

StatusOr<std::vector<GroupProducts::Group>> GroupProducts::ReadGroups(
    const Call& call) const {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  std::vector<int32_t> sizes(static_cast<size_t>(layout_.groups));
  RETURN_IF_ERROR(
      CheckCuda(runtime,
                runtime.cuda.memcpy_async(sizes.data(), call.operands[layout_.sizes],
                                          sizes.size() * sizeof(sizes[0]),
                                          kDeviceToHost, call.stream),
                "cudaMemcpyAsync"));
  RETURN_IF_ERROR(CheckCuda(runtime, runtime.cuda.stream_synchronize(call.stream),
                            "cudaStreamSynchronize"));
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t number = 0; number < layout_.groups; ++number) {
    const int64_t rows = std::clamp<int64_t>(sizes[static_cast<size_t>(number)], 0,
                                             layout_.rows - first);
    if (rows > 0) groups.push_back({number, first, rows});
    first += rows;
  }
  return groups;
}

Status GroupProducts::ZeroRest(const Call& call,
                               const std::vector<Group>& groups) const {
  const CudnnRuntime& runtime = *LoadedCudnnRuntime();
  const auto zero = [&](const Part& part, int64_t begin, int64_t end) -> Status {
    const auto bytes = static_cast<size_t>((end - begin) * part.step_bytes);
    if (bytes == 0) return {};
    return CheckCuda(
        runtime, runtime.cuda.memset_async(call.At(part, begin), 0, bytes, call.stream),
        "cudaMemsetAsync");
  };
  const int64_t filled = groups.empty() ? 0 : groups.back().first + groups.back().rows;
  for (const Product& product : layout_.products) {
    const Part& output = product[2];
    if (output.rows_axis >= 0) {
      RETURN_IF_ERROR(zero(output, filled, layout_.rows));
      continue;
    }
    int64_t next = 0;
    for (const Group& group : groups) {
      RETURN_IF_ERROR(zero(output, next, group.number));
      next = group.number + 1;
    }
    RETURN_IF_ERROR(zero(output, next, layout_.groups));
  }
  return {};
}

Status GroupProducts::Execute(CudnnHandle handle, CudaStream stream,
                              void* const* operands, void* const* results,
                              void* workspace) const {
  char* const start = static_cast<char*>(workspace);
  const Call call{handle, stream, operands, results, start, start + engine_bytes_};
  ASSIGN_OR_RETURN(const std::vector<Group> groups, ReadGroups(call));
  for (const Group& group : groups) {
    for (size_t i = 0; i < layout_.products.size(); ++i) {
      const bool has_rows = layout_.products[i][2].rows_axis >= 0;
      RETURN_IF_ERROR(has_rows ? RunRows(call, i, group) : RunSum(call, i, group));
    }
  }
  return ZeroRest(call, groups);
}

}  // namespace jax_cudnn
