// SPDX-License-Identifier: Apache-2.0
// Writing and reading plan files.

#include "keeping/plan_file.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "cudnn/cudnn_library.h"

// CMakeLists.txt defines it for this file.
#ifndef JAX_CUDNN_BUILDER
#error "JAX_CUDNN_BUILDER is the digest of the sources"
#endif

namespace jax_cudnn {
namespace {

// The CPU that this extension is compiled for, as uname names it.
#if defined(__x86_64__)
constexpr std::string_view kCpu = "x86_64";
#elif defined(__aarch64__)
constexpr std::string_view kCpu = "aarch64";
#else
#error "plan files name the CPU that they were made on: add this one"
#endif

// "jaxcudnn" and the version of the form.
constexpr std::string_view kMagic = "jaxcudnn-plan-1\n";

// What cuDNN or its frontend reads while it plans, besides the graph.
constexpr const char* kSettings[] = {
    "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT",
    "CUDNN_RESCALE_THRESHOLD",
    "NVIDIA_TF32_OVERRIDE",
};

// The fields of a key, by the names that they have in its text. Exactly one of the two
// members is set.
struct Field {
  std::string_view name;
  std::string PlanKey::* text = nullptr;
  int64_t PlanKey::* number = nullptr;
};

constexpr std::array<Field, 14> kFields = {{
    {"gpu", &PlanKey::gpu},
    {"sm_version", nullptr, &PlanKey::sm_version},
    {"sm_count", nullptr, &PlanKey::sm_count},
    {"cudnn_version", nullptr, &PlanKey::cudnn_version},
    {"cuda_major", nullptr, &PlanKey::cuda_major},
    {"cublaslt_version", nullptr, &PlanKey::cublaslt_version},
    {"nvrtc_version", nullptr, &PlanKey::nvrtc_version},
    {"driver_version", nullptr, &PlanKey::driver_version},
    {"cpu", &PlanKey::cpu},
    {"frontend_version", &PlanKey::frontend_version},
    {"builder", &PlanKey::builder},
    {"settings", &PlanKey::settings},
    {"request", &PlanKey::request},
    {"graph", &PlanKey::graph},
}};

std::string Value(const PlanKey& key, const Field& field) {
  return field.text == nullptr ? std::to_string(key.*field.number) : key.*field.text;
}

// Takes decimal digits and the character after them off the front of `text`.
bool TakeCount(std::string_view& text, char end, size_t& count) {
  const auto [rest, error] =
      std::from_chars(text.data(), text.data() + text.size(), count);
  const auto length = static_cast<size_t>(rest - text.data());
  if (error != std::errc() || length == text.size() || *rest != end) return false;
  text.remove_prefix(length + 1);
  return true;
}

bool TakePrefix(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) return false;
  text.remove_prefix(prefix.size());
  return true;
}

Status Corrupt(const std::string& what) {
  return InvalidArgument("not a whole plan file: " + what);
}

// "sm_90 with 132 multiprocessors"
std::string Size(const PlanKey& key) {
  return "sm_" + std::to_string(key.sm_version) + " with " +
         std::to_string(key.sm_count) + " multiprocessors";
}

std::string OrNone(const std::string& text) { return text.empty() ? "none" : text; }

}  // namespace

PlanKey LocalKey() {
  PlanKey key;
  key.cpu = kCpu;
  key.builder = JAX_CUDNN_BUILDER;
  for (const char* name : kSettings) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): read as the frontend reads it
    const char* value = std::getenv(name);
    if (value == nullptr) continue;
    if (!key.settings.empty()) key.settings += ' ';
    key.settings.append(name).append("=").append(value);
  }
  return key;
}

std::string WriteKey(const PlanKey& key) {
  std::string text;
  for (const Field& field : kFields) {
    const std::string value = Value(key, field);
    text.append(field.name).append(" ").append(std::to_string(value.size()));
    text.append(":").append(value) += '\n';
  }
  return text;
}

StatusOr<PlanKey> ReadKey(std::string_view text) {
  PlanKey key;
  for (const Field& field : kFields) {
    size_t size = 0;
    if (!TakePrefix(text, field.name) || !TakePrefix(text, " ") ||
        !TakeCount(text, ':', size) || size >= text.size()) {
      return Corrupt("its key has no field " + std::string(field.name));
    }
    std::string_view value = text.substr(0, size);
    text.remove_prefix(size);
    if (field.text != nullptr) {
      key.*field.text = value;
    } else {
      const auto [rest, error] =
          std::from_chars(value.data(), value.data() + value.size(), key.*field.number);
      if (error != std::errc() || rest != value.data() + value.size()) {
        return Corrupt("its key's " + std::string(field.name) + " is not a number");
      }
    }
    if (!TakePrefix(text, "\n")) {
      return Corrupt("its key's " + std::string(field.name) + " does not end");
    }
  }
  if (!text.empty()) return Corrupt("its key goes on");
  return key;
}

Status CheckSameMachine(const PlanKey& made, const PlanKey& here) {
  std::string wrong;
  const auto compare = [&](bool same, const std::string& label,
                           const std::string& theirs, const std::string& ours) {
    if (same) return;
    wrong += "\n  - " + label + ": made for " + theirs + ", this is " + ours;
  };
  compare(made.gpu == here.gpu, "GPU", made.gpu, here.gpu);
  compare(Size(made) == Size(here), "GPU", Size(made), Size(here));
  compare(made.cudnn_version == here.cudnn_version, "cuDNN",
          VersionText(static_cast<int>(made.cudnn_version)),
          VersionText(static_cast<int>(here.cudnn_version)));
  compare(made.cuda_major == here.cuda_major, "cuDNN's CUDA",
          std::to_string(made.cuda_major), std::to_string(here.cuda_major));
  const auto library = [](int64_t version, std::string (*text)(int)) {
    return version == 0 ? "an unknown one" : text(static_cast<int>(version));
  };
  compare(made.cublaslt_version == here.cublaslt_version, "cuBLASLt",
          library(made.cublaslt_version, VersionText),
          library(here.cublaslt_version, VersionText));
  compare(made.nvrtc_version == here.nvrtc_version, "NVRTC",
          library(made.nvrtc_version, CudaVersionText),
          library(here.nvrtc_version, CudaVersionText));
  compare(made.driver_version == here.driver_version || made.driver_version == 0 ||
              here.driver_version == 0,
          "the CUDA of the driver",
          CudaVersionText(static_cast<int>(made.driver_version)),
          CudaVersionText(static_cast<int>(here.driver_version)));
  compare(made.cpu == here.cpu, "CPU", made.cpu, here.cpu);
  compare(made.frontend_version == here.frontend_version, "cudnn-frontend",
          made.frontend_version, here.frontend_version);
  compare(made.builder == here.builder, "build of jax_cudnn", made.builder,
          here.builder);
  compare(made.settings == here.settings, "environment variables",
          OrNone(made.settings), OrNone(here.settings));
  if (wrong.empty()) return {};
  return FailedPrecondition("this plan cannot be used here." + wrong);
}

std::string WritePlanFile(const PlanFile& file) {
  std::string body;
  AppendInteger(file.key.size(), body);
  AppendInteger(file.payload.size(), body);
  body.append(file.key).append(file.payload);
  std::string bytes(kMagic);
  AppendInteger(Digest(body), bytes);
  return bytes + body;
}

StatusOr<PlanFile> ReadPlanFile(std::string_view bytes) {
  uint64_t digest = 0;
  uint64_t key_size = 0;
  uint64_t payload_size = 0;
  if (!TakePrefix(bytes, kMagic)) return Corrupt("it does not begin like one");
  if (!TakeInteger(bytes, digest)) return Corrupt("it ends early");
  const std::string_view body = bytes;
  if (!TakeInteger(bytes, key_size) || !TakeInteger(bytes, payload_size)) {
    return Corrupt("it ends early");
  }
  if (key_size > bytes.size() || payload_size != bytes.size() - key_size) {
    return Corrupt("it has " + std::to_string(bytes.size()) +
                   " bytes of contents and says otherwise");
  }
  if (Digest(body) != digest) return Corrupt("its checksum is wrong");
  return PlanFile{std::string(bytes.substr(0, key_size)),
                  std::string(bytes.substr(key_size))};
}

uint64_t Digest(std::string_view bytes) {
  // FNV-1a, then MurmurHash3's last step: every step is a bijection of the state, so
  // that texts which differ in one byte end differently.
  constexpr uint64_t kOffset = 0xcbf29ce484222325;
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t state = kOffset;
  for (const char byte : bytes) {
    state = (state ^ static_cast<unsigned char>(byte)) * kPrime;
  }
  state = (state ^ (state >> 33)) * 0xff51afd7ed558ccd;
  state = (state ^ (state >> 33)) * 0xc4ceb9fe1a85ec53;
  return state ^ (state >> 33);
}

}  // namespace jax_cudnn
