// SPDX-License-Identifier: Apache-2.0
// Checks of a node against its description, with the messages that Python gives.

#include "graph/shape_rules.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace jax_cudnn {
namespace {

using Dims = std::vector<int64_t>;
// The letters of an axis; a starred one is written out, as in "y0".
using Letters = std::vector<std::string>;
using Sizes = std::map<std::string, int64_t, std::less<>>;

// A size times a dilation needs twice the bits of either, and the text is untrusted.
__extension__ using Wide = __int128;

Status Fail(const NodeKind& kind, const std::string& what) {
  return InvalidArgument(kind.name + ": " + what);
}

Status CheckLeast(const NodeKind& kind, const std::string& name,
                  const AttributeField& field, const AttributeValue& value) {
  if (!field.least.has_value()) return {};
  const bool is_list = field.type == AttributeType::kIntegers;
  const Dims values = is_list ? std::get<Dims>(value) : Dims{std::get<int64_t>(value)};
  if (std::all_of(values.begin(), values.end(),
                  [&](int64_t each) { return each >= *field.least; })) {
    return {};
  }
  const std::string shown = is_list ? ListText(values) : std::to_string(values[0]);
  return Fail(kind, name + " " + shown + " is below " + std::to_string(*field.least));
}

// A list has as many entries as the table says, if it says so.
Status CheckCount(const NodeKind& kind, const std::string& name,
                  const AttributeField& field, const AttributeValue& value) {
  if (field.entries.empty()) return {};
  const auto count = static_cast<int64_t>(std::get<Dims>(value).size());
  std::string counts;
  for (const int64_t each : field.entries) {
    if (each == count) return {};
    counts += (counts.empty() ? "" : " or ") + std::to_string(each);
  }
  return Fail(kind, name + " has " + std::to_string(count) + " entries, not " + counts);
}

// --- the tensors of one node --------------------------------------------------------

class Checker {
 public:
  Checker(const NodeKind& kind, const NodeSpec& node, const Roles& roles)
      : kind_(kind), node_(node), roles_(roles) {
    for (const Role& role : kind.roles) {
      if (roles.count(role.name) != 0) present_.push_back(&role);
    }
  }

  Status Check() {
    RETURN_IF_ERROR(CheckPrimals());
    RETURN_IF_ERROR(CheckRanks());
    RETURN_IF_ERROR(CheckEntries());
    for (const Role* role : present_) RETURN_IF_ERROR(CheckDType(*role));
    Solve();
    RETURN_IF_ERROR(Factor());
    RETURN_IF_ERROR(CountWindows());
    for (const Role* role : present_) RETURN_IF_ERROR(CheckDims(*role));
    return kind_.modes_to_bool.empty() ? Status() : CheckMode();
  }

 private:
  const TensorSpec& Tensor(const Role& role) const {
    return *roles_.find(role.name)->second;
  }

  const TensorSpec* Find(std::string_view role) const {
    const auto found = roles_.find(role);
    return found == roles_.end() ? nullptr : found->second;
  }

  // The letters of each axis of a role.
  std::vector<std::pair<const Axis*, Letters>> Axes(const Role& role) const {
    std::vector<std::pair<const Axis*, Letters>> axes;
    for (const Axis& axis : role.axes) {
      if (!axis.is_starred) {
        Letters letters;
        for (char letter : axis.letters) letters.emplace_back(1, letter);
        axes.emplace_back(&axis, std::move(letters));
        continue;
      }
      for (int64_t i = 0; i < stars_; ++i) {
        Letters letters;
        if (!axis.letters.empty()) letters.push_back(axis.letters + std::to_string(i));
        axes.emplace_back(&axis, std::move(letters));
      }
    }
    return axes;
  }

  // The gradient of an operand needs that operand.
  Status CheckPrimals() const {
    for (const Role* role : present_) {
      if (role->name.rfind("grad_", 0) != 0) continue;
      const std::string primal = role->name.substr(5);
      if (kind_.Find(primal) != nullptr && Find(primal) == nullptr) {
        return Fail(kind_, role->name + " without " + primal);
      }
    }
    return {};
  }

  // Starred letters stand for the same number of axes in all roles.
  Status CheckRanks() {
    bool is_known = false;
    for (const Role* role : present_) {
      const auto rank = static_cast<int64_t>(Tensor(*role).dims.size());
      const auto fixed = static_cast<int64_t>(
          std::count_if(role->axes.begin(), role->axes.end(),
                        [](const Axis& axis) { return !axis.is_starred; }));
      const bool has_stars = fixed < static_cast<int64_t>(role->axes.size());
      const std::string text = role->name + " has rank " + std::to_string(rank);
      if (has_stars && !is_known) {
        is_known = true;
        stars_ = rank - fixed;
        if (stars_ < kind_.least_stars || stars_ > kind_.most_stars) {
          return Fail(kind_, text + ", not " +
                                 std::to_string(fixed + kind_.least_stars) + " to " +
                                 std::to_string(fixed + kind_.most_stars));
        }
      }
      const int64_t expected = fixed + (has_stars ? stars_ : 0);
      if (rank != expected) {
        return Fail(kind_, text + ", not " + std::to_string(expected));
      }
    }
    return {};
  }

  Status CheckEntries() const {
    for (const auto& [name, field] : kind_.attributes) {
      if (!field.has_entry_per_star) continue;
      const size_t count = node_.Attribute<Dims>(name).size();
      if (count != static_cast<size_t>(stars_)) {
        return Fail(kind_, name + " has " + std::to_string(count) + " entries, not " +
                               std::to_string(stars_));
      }
    }
    return {};
  }

  // What a role's dtype has to be, or what the table says of it.
  std::string WantedDType(const Role& role) const {
    if (const TensorSpec* same = Find(role.same_as)) {
      return std::string(DTypeName(same->dtype));
    }
    if (role.dtype.rfind("like ", 0) == 0) {
      return std::string(DTypeName(Find(role.dtype.substr(5))->dtype));
    }
    if (role.dtype.rfind("sum of ", 0) == 0) {
      return Find(role.dtype.substr(7))->dtype == DType::kF64 ? "f64" : "f32";
    }
    return role.dtype;
  }

  Status CheckDType(const Role& role) const {
    const DType dtype = Tensor(role).dtype;
    const std::string wanted = WantedDType(role);
    const std::string text = role.name + " is " + std::string(DTypeName(dtype));
    if (wanted == "float") {
      return IsFloat(dtype) ? Status() : Fail(kind_, text + ", not a float");
    }
    if (wanted == "not bool") {
      return dtype != DType::kBool ? Status() : Fail(kind_, text);
    }
    if (wanted == "any") return {};
    std::string allowed;
    size_t begin = 0;
    while (begin < wanted.size()) {
      const size_t end = std::min(wanted.find(' ', begin), wanted.size());
      const std::string word = wanted.substr(begin, end - begin);
      begin = end + 1;
      if (DTypeNamed(word) == dtype) return {};
      allowed += (allowed.empty() ? "" : " or ") + word;
    }
    return Fail(kind_, text + ", not " + allowed);
  }

  // The size of each letter: that of the first tensor that has it alone. A letter that
  // operands have in brackets only has the size to which they broadcast.
  void Solve() {
    Sizes bracketed;
    for (const bool are_inputs : {true, false}) {
      for (const Role* role : present_) {
        if (role->is_input != are_inputs || !role->same_as.empty()) continue;
        size_t i = 0;
        for (const auto& [axis, letters] : Axes(*role)) {
          const int64_t dim = Tensor(*role).dims[i++];
          if (letters.size() != 1) continue;
          if (!axis->is_optional) {
            sizes_.emplace(letters[0], dim);
          } else if (const auto found = bracketed.find(letters[0]);
                     found == bracketed.end() || found->second == 1) {
            bracketed[letters[0]] = dim;
          }
        }
      }
      if (are_inputs) sizes_.insert(bracketed.begin(), bracketed.end());
    }
  }

  // Finds the letters that stand beside others on every axis, by division.
  Status Factor() {
    for (bool found = true; found;) {
      found = false;
      for (const Role* role : present_) {
        size_t i = 0;
        for (const auto& [axis, letters] : Axes(*role)) {
          const size_t place = i++;
          if (axis->is_optional || letters.size() < 2) continue;
          ASSIGN_OR_RETURN(const bool is_new, FactorAxis(*role, place, letters));
          found |= is_new;
        }
      }
    }
    return {};
  }

  StatusOr<bool> FactorAxis(const Role& role, size_t axis, const Letters& letters) {
    std::string unknown;
    std::string names;
    Wide known = 1;
    for (const std::string& letter : letters) {
      const auto size = sizes_.find(letter);
      if (size == sizes_.end()) {
        if (!unknown.empty()) return false;
        unknown = letter;
        continue;
      }
      known *= size->second;
      const auto name = kind_.letters.find(letter);
      names += (names.empty() ? "" : " and ") +
               (name == kind_.letters.end() ? letter : name->second);
    }
    if (unknown.empty()) return false;
    const int64_t size = Tensor(role).dims[axis];
    if (known == 0 ? size != 0 : size % known != 0) {
      return Fail(kind_, std::to_string(size) + " along axis " + std::to_string(axis) +
                             " of " + role.name + " does not divide by " +
                             std::to_string(static_cast<int64_t>(known)) + " (" +
                             names + ")");
    }
    sizes_[unknown] = known == 0 ? 1 : static_cast<int64_t>(size / known);
    return true;
  }

  int64_t Entry(const std::string& name, int64_t i) const {
    return node_.Attribute<Dims>(name)[static_cast<size_t>(i)];
  }

  // Kinds without dilations have 1.
  int64_t Dilation(const std::string& name, int64_t i) const {
    return kind_.attributes.count(name) == 0 ? 1 : Entry(name, i);
  }

  int64_t WindowSize(const std::string& window, int64_t i) {
    if (kind_.attributes.count(window) != 0) return Entry(window, i);
    return sizes_[window + std::to_string(i)];
  }

  Status CountWindows() {
    const auto dilated = [](int64_t size, int64_t dilation) -> Wide {
      return size == 0 ? 0 : static_cast<Wide>(size - 1) * dilation + 1;
    };
    for (const WindowRule& rule : kind_.windows) {
      for (int64_t i = 0; i < stars_; ++i) {
        const std::string number = std::to_string(i);
        const Wide room =
            dilated(sizes_[rule.size + number], Dilation("lhs_dilation", i)) +
            Entry("padding_low", i) + Entry("padding_high", i) -
            dilated(WindowSize(rule.window, i), Dilation("rhs_dilation", i));
        const Wide count = room < 0 ? 0 : room / Entry("window_strides", i) + 1;
        if (count > std::numeric_limits<int64_t>::max()) {
          return Fail(kind_,
                      "the size of spatial axis " + number + " overflows 64 bits");
        }
        sizes_[rule.result + number] = static_cast<int64_t>(count);
      }
    }
    return {};
  }

  Status CheckDims(const Role& role) const {
    const Dims& dims = Tensor(role).dims;
    Dims full;
    bool is_free = role.same_as.empty();
    bool fits = true;
    size_t i = 0;
    for (const auto& [axis, letters] : Axes(role)) {
      Wide size = 1;
      for (const std::string& letter : letters) size *= sizes_.find(letter)->second;
      full.push_back(static_cast<int64_t>(size));
      const bool may_be_one = axis->is_optional && role.same_as.empty();
      fits &= dims[i] == full[i] || (dims[i] == 1 && may_be_one);
      is_free &= axis->is_optional;
      ++i;
    }
    if (const TensorSpec* same = Find(role.same_as)) {
      full = same->dims;
      fits = dims == full;
    }
    if (fits) return {};
    if (is_free) {
      return Fail(kind_, role.name + " dims " + ListText(dims) +
                             " do not broadcast to " + ListText(full));
    }
    return Fail(kind_,
                role.name + " has dims " + ListText(dims) + ", not " + ListText(full));
  }

  // Inputs, alpha and bools are those of a pointwise node's mode.
  Status CheckMode() const {
    const auto& mode = node_.Attribute<std::string>("mode");
    if (node_.Attribute<double>("alpha") != 0 &&
        kind_.modes_with_alpha.count(mode) == 0) {
      return Fail(kind_, mode + " takes no alpha");
    }
    const size_t arity = kind_.arity.find(mode)->second;
    std::string given;
    size_t count = 0;
    bool fits = true;
    for (const Role* role : present_) {
      if (!role->is_input) continue;
      given += (given.empty() ? "" : ", ") + role->name;
      fits &= kind_.roles[count++].name == role->name;
    }
    if (!fits || count != arity) {
      return Fail(kind_,
                  mode + " takes " + std::to_string(arity) + " inputs, not " + given);
    }
    const DType output = Find("output")->dtype;
    if ((output == DType::kBool) != (kind_.modes_to_bool.count(mode) != 0)) {
      return Fail(kind_,
                  "the output of " + mode + " is " + std::string(DTypeName(output)));
    }
    for (const Role* role : present_) {
      if (!role->is_input) continue;
      const DType dtype = Tensor(*role).dtype;
      if ((dtype == DType::kBool) != (mode == "select" && role->name == "c")) {
        return Fail(
            kind_, role->name + " of " + mode + " is " + std::string(DTypeName(dtype)));
      }
    }
    return {};
  }

  const NodeKind& kind_;
  const NodeSpec& node_;
  const Roles& roles_;
  std::vector<const Role*> present_;
  int64_t stars_ = 0;
  Sizes sizes_;
};

}  // namespace

Status CheckAttributes(const NodeKind& kind, const NodeSpec& node) {
  for (const auto& [name, field] : kind.attributes) {
    const AttributeValue& value = node.attributes.find(name)->second;
    if (field.type == AttributeType::kNumber &&
        !std::isfinite(std::get<double>(value))) {
      return Fail(kind, name + " " + std::to_string(std::get<double>(value)) +
                            " is not finite");
    }
    RETURN_IF_ERROR(CheckCount(kind, name, field, value));
    RETURN_IF_ERROR(CheckLeast(kind, name, field, value));
  }
  if (kind.arity.empty()) return {};
  const auto& mode = node.Attribute<std::string>("mode");
  if (kind.arity.count(mode) == 0) {
    return Fail(kind, "mode '" + mode + "' is not a known one");
  }
  return {};
}

Status CheckTensors(const NodeKind& kind, const NodeSpec& node, const Roles& roles) {
  return Checker(kind, node, roles).Check();
}

}  // namespace jax_cudnn
