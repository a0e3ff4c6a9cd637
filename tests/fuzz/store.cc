// SPDX-License-Identifier: Apache-2.0
// Puts any bytes in the place of a stored plan: the store answers what was saved under
// the key or nothing, and takes the plan anew.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "fuzzing.h"
#include "keeping/plan_file.h"
#include "keeping/plan_store.h"

namespace jax_cudnn {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLimitBytes = 1 << 20;

// A folder of this process, and in it the file of the key; gone at exit.
class Folder {
 public:
  explicit Folder(const std::string& key) {
    // In memory where there is such a place: each save waits for its disk.
    const char* const above = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    path_ = std::string(above) + "/jax_cudnn-fuzz-XXXXXX";
    Require(mkdtemp(path_.data()) != nullptr, "a folder can be made");
    PlanStore::Global().Configure({path_, kLimitBytes});
    PlanStore::Global().Save(key, "");
    file_ = fs::directory_iterator(path_)->path().string();
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  void Put(std::string_view bytes) const {
    const int file =
        open(file_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    Require(file >= 0, "the file can be opened");
    Require(
        write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
        "the file can be written");
    close(file);
  }

 private:
  std::string path_;
  std::string file_;
};

}  // namespace
}  // namespace jax_cudnn

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_cudnn;  // NOLINT(google-build-using-namespace)
  static const std::string key = "a key";
  static const Folder folder(key);
  PlanStore& store = PlanStore::Global();
  const std::string_view bytes = Text(data, size);
  folder.Put(bytes);
  const auto whole = ReadPlanFile(bytes);
  const auto found = store.Load(key);
  if (whole.ok() && whole->key == key) {
    Require(found == whole->payload, "a whole file is read");
  } else {
    Require(!found.has_value(), "what is no plan of this key is nothing");
  }
  const std::string payload(bytes);
  store.Save(key, payload);
  Require(store.Load(key) == payload, "a plan is saved over what was there");
  return 0;
}
