// SPDX-License-Identifier: Apache-2.0
// Grouped products as one of cuDNN's matmuls for each group of rows.
//
// cuDNN's own grouped matmul takes three to six times as long as its matmuls of the
// same rows (cuDNN 9.19, H100), and there is none for the gradient of the matrices.
// How many rows a group has is known on the device only: the host waits for it, as it
// does for the condition of a loop.

#ifndef JAX_CUDNN_GROUP_PRODUCTS_H_
#define JAX_CUDNN_GROUP_PRODUCTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "candidates/candidate.h"
#include "candidates/launchable.h"
#include "candidates/launchable_graph.h"
#include "candidates/plan_request.h"
#include "candidates/plan_target.h"
#include "graph/graph_spec.h"
#include "groups/group_layout.h"

namespace jax_cudnn {

class GroupProducts : public Launchable {
 public:
  // Whether a graph is run so: one that has the sizes of its groups and no starts.
  static bool Covers(const GraphSpec& graph);

  // The matmul of a group of average size, for which cuDNN is asked for candidates.
  static StatusOr<GraphSpec> TypicalMatmul(const GraphSpec& graph);

  // Why a candidate for that matmul cannot be used; empty where it can. A group may
  // have any number of rows, and a plan is made when a number is first met.
  static std::string_view RefusalOf(const Candidate& candidate);

  // The products by the candidate with that request. Sets its workspace.
  static StatusOr<std::unique_ptr<GroupProducts>> Make(const GraphSpec& graph,
                                                       const PlanTarget& target,
                                                       Candidate& candidate);

  Status Execute(CudnnHandle handle, CudaStream stream, void* const* operands,
                 void* const* results, void* workspace) const override;
  StatusOr<std::string> Serialize() const override { return std::string(); }
  bool Waits() const override { return true; }

 private:
  using Part = GroupLayout::Part;
  using Product = GroupLayout::Product;

  // What launches are given, whichever group they are for.
  struct Call {
    CudnnHandle handle;
    CudaStream stream;
    void* const* operands;
    void* const* results;
    char* workspace;  // the engine's
    char* copies;     // of a group's rows

    // The memory of a part from a row, or a group, on.
    char* At(const Part& part, int64_t place) const;
  };

  // A group that has rows.
  struct Group {
    int64_t number;
    int64_t first;
    int64_t rows;
  };

  GroupProducts(GroupLayout layout, PlanRequest request, PlanTarget target)
      : layout_(std::move(layout)),
        request_(std::move(request)),
        target_(std::move(target)) {}

  static GraphSpec Matmul(const Product& product, int64_t rows);
  static int64_t TypicalRows(const GroupLayout& layout);

  // The launch of a product of so many rows, built if need be.
  StatusOr<const LaunchableGraph*> LaunchOf(size_t product, int64_t rows,
                                            CudnnHandle handle) const;
  Status Launch(const Call& call, size_t product, int64_t rows,
                const std::array<char*, 3>& memory) const;
  // The product whose result has the group's rows, and that which adds up over them.
  Status RunRows(const Call& call, size_t product, const Group& group) const;
  Status RunSum(const Call& call, size_t product, const Group& group) const;

  StatusOr<std::vector<Group>> ReadGroups(const Call& call) const;
  // Zeros for rows in no group and for the matrices of groups without rows.
  Status ZeroRest(const Call& call, const std::vector<Group>& groups) const;
  int64_t CopyBytes(const Part& part) const;

  const GroupLayout layout_;
  const PlanRequest request_;
  const PlanTarget target_;
  int64_t engine_bytes_ = 0;  // of workspace; the copies follow
  mutable std::mutex mutex_;  // guards launches_
  // By product and number of rows; never taken out.
  mutable std::map<std::pair<size_t, int64_t>, std::unique_ptr<LaunchableGraph>>
      launches_;
};

}  // namespace jax_cudnn

#endif  // JAX_CUDNN_GROUP_PRODUCTS_H_
