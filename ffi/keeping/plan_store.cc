// SPDX-License-Identifier: Apache-2.0
// The folder of plan files, on POSIX calls.

#include "keeping/plan_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/guard.h"
#include "base/log.h"
#include "keeping/plan_file.h"

namespace jax_cudnn {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".plan";
constexpr std::string_view kTemporary = "tmp-";
// A temporary file of this age has lost its writer.
constexpr int64_t kTemporarySeconds = 3600;

Status Failed(const std::string& call, const std::string& path, int error) {
  return Internal(call + " " + path + ": " + std::generic_category().message(error));
}

// An open file; closed on destruction.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&&) = delete;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }

  Status Close(const std::string& path) {
    const int error = close(std::exchange(descriptor_, -1)) == 0 ? 0 : errno;
    return error == 0 ? Status() : Failed("close", path, error);
  }

 private:
  int descriptor_;
};

// A file's path while it is being written; removed on destruction unless released.
class TemporaryPath {
 public:
  explicit TemporaryPath(std::string path) : path_(std::move(path)) {}
  TemporaryPath(const TemporaryPath&) = delete;
  TemporaryPath& operator=(const TemporaryPath&) = delete;
  ~TemporaryPath() {
    if (!path_.empty()) unlink(path_.c_str());
  }

  const std::string& get() const { return path_; }
  void Release() { path_.clear(); }

 private:
  std::string path_;
};

std::string PathOf(const std::string& directory, const std::string& key) {
  std::array<char, 17> name{};
  std::snprintf(name.data(), name.size(), "%016llx",
                static_cast<unsigned long long>(Digest(key)));
  return directory + "/" + name.data() + std::string(kSuffix);
}

Status WriteAll(const File& file, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t count = write(file.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Failed("write", path, errno);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return {};
}

StatusOr<std::string> ReadAll(const File& file, size_t size, const std::string& path) {
  std::string bytes(size, '\0');
  size_t filled = 0;
  while (filled < size) {
    const ssize_t count = read(file.get(), &bytes[filled], size - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Failed("read", path, errno);
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  bytes.resize(filled);
  return bytes;
}

// A plan is code that will run: whoever could write the file must be us or root.
Status CheckTrust(const struct stat& info, const std::string& path) {
  if (!S_ISREG(info.st_mode)) return Internal(path + " is not a file");
  if (info.st_uid != geteuid() && info.st_uid != 0) {
    return Internal(path + " belongs to another user");
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return Internal(path + " can be written by other users");
  }
  return {};
}

// The bytes of a file and a note of its use, or nothing where there is none.
StatusOr<std::optional<std::string>> ReadFile(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file.is_open()) {
    if (errno == ENOENT) return std::optional<std::string>();
    return Failed("open", path, errno);
  }
  struct stat info{};
  if (fstat(file.get(), &info) != 0) return Failed("stat", path, errno);
  RETURN_IF_ERROR(CheckTrust(info, path));
  ASSIGN_OR_RETURN(std::string bytes,
                   ReadAll(file, static_cast<size_t>(info.st_size), path));
  // On a read-only disk the order of use is not kept, and nothing is removed either.
  static_cast<void>(futimens(file.get(), nullptr));
  return std::optional<std::string>(std::move(bytes));
}

// Makes a folder and those above it, for this user only.
Status MakeDirectory(const std::string& path) {
  if (mkdir(path.c_str(), S_IRWXU) == 0) return {};
  int error = errno;
  const size_t slash = path.rfind('/');
  if (error == ENOENT && slash != std::string::npos && slash > 0) {
    RETURN_IF_ERROR(MakeDirectory(path.substr(0, slash)));
    error = mkdir(path.c_str(), S_IRWXU) == 0 ? 0 : errno;
  }
  if (error == 0) return {};
  struct stat info{};
  if (error == EEXIST && stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    return {};
  }
  return Failed("mkdir", path, error);
}

// Writes the file under another name, makes sure that the disk has it, and renames it.
Status WriteFile(const std::string& directory, const std::string& path,
                 std::string_view bytes) {
  RETURN_IF_ERROR(MakeDirectory(directory));
  std::string name = directory + "/" + std::string(kTemporary) + "XXXXXX";
  File file(mkostemp(name.data(), O_CLOEXEC));  // mode 0600
  if (!file.is_open()) return Failed("create", name, errno);
  TemporaryPath temporary(std::move(name));
  RETURN_IF_ERROR(WriteAll(file, bytes, temporary.get()));
  if (fsync(file.get()) != 0) return Failed("fsync", temporary.get(), errno);
  RETURN_IF_ERROR(file.Close(temporary.get()));
  if (rename(temporary.get().c_str(), path.c_str()) != 0) {
    return Failed("rename to", path, errno);
  }
  temporary.Release();
  return {};
}

struct StoredFile {
  std::string path;
  int64_t bytes = 0;
  timespec used{};
};

struct Contents {
  std::vector<StoredFile> plans;
  std::vector<StoredFile> temporaries;
};

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool EndsWith(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() &&
         text.substr(text.size() - suffix.size()) == suffix;
}

// Our own files in the folder; other files there are not touched. Nothing where there
// is no folder.
StatusOr<Contents> List(const std::string& directory) {
  Contents contents;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool is_plan = EndsWith(name, kSuffix);
    if (!is_plan && !StartsWith(name, kTemporary)) continue;
    StoredFile file;
    file.path = entry->path().string();
    struct stat info{};
    // Another process may have removed it meanwhile.
    if (lstat(file.path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    file.bytes = info.st_size;
    file.used = info.st_mtim;
    (is_plan ? contents.plans : contents.temporaries).push_back(std::move(file));
  }
  if (!error || error == std::errc::no_such_file_or_directory) return contents;
  return Failed("list", directory, error.value());
}

// False where it cannot be removed; gone already is as good.
bool Remove(const std::string& path) {
  return unlink(path.c_str()) == 0 || errno == ENOENT;
}

// Removes what was used least recently until the limit holds, and what killed writers
// left behind. `newest` stays: file systems count time in steps of milliseconds.
Status Trim(const std::string& directory, const std::string& newest,
            int64_t limit_bytes) {
  ASSIGN_OR_RETURN(Contents contents, List(directory));
  const int64_t now = time(nullptr);
  for (const StoredFile& file : contents.temporaries) {
    if (now - file.used.tv_sec > kTemporarySeconds) Remove(file.path);
  }
  int64_t total = 0;
  for (const StoredFile& file : contents.plans) total += file.bytes;
  std::sort(contents.plans.begin(), contents.plans.end(),
            [](const StoredFile& a, const StoredFile& b) {
              return std::pair(a.used.tv_sec, a.used.tv_nsec) <
                     std::pair(b.used.tv_sec, b.used.tv_nsec);
            });
  for (const StoredFile& file : contents.plans) {
    if (total <= limit_bytes) break;
    if (file.path == newest) continue;
    if (!Remove(file.path)) return Failed("unlink", file.path, errno);
    total -= file.bytes;
  }
  return {};
}

// The payload of a plan file, which must be whole and of this key.
StatusOr<std::string> TakePayload(const std::string& bytes, const std::string& key,
                                  const std::string& path) {
  auto file = ReadPlanFile(bytes);
  if (!file.ok()) {
    Remove(path);
    return Internal(path + ": " + file.status().message());
  }
  // Two keys with one digest: the other one was here first. Saving replaces it.
  if (file->key != key) return Internal(path + " holds a plan for another key");
  return std::move(file->payload);
}

}  // namespace

PlanStore& PlanStore::Global() {
  // Leaked: threads of XLA may plan while the process goes down.
  static auto& store = *new PlanStore;
  return store;
}

void PlanStore::SetSource(Source source) {
  const std::scoped_lock lock(resolving_);
  source_ = std::move(source);
}

void PlanStore::Configure(PlanStoreSettings settings) {
  const std::scoped_lock resolving(resolving_);
  source_ = nullptr;
  const std::scoped_lock lock(mutex_);
  settings_ = std::move(settings);
}

PlanStoreSettings PlanStore::Settings() {
  const DeferredLog deferred;
  const std::scoped_lock resolving(resolving_);
  if (source_ != nullptr) {
    const Source source = std::exchange(source_, nullptr);
    auto answer = Guard("asking where plans are stored", source);
    if (!answer.ok()) {
      NoteFailure("no plans are stored: " + answer.status().message());
    } else {
      const std::scoped_lock lock(mutex_);
      settings_ = std::move(*answer);
    }
  }
  const std::scoped_lock lock(mutex_);
  return settings_;
}

bool PlanStore::is_on() { return !Settings().directory.empty(); }

void PlanStore::Count(int64_t PlanStoreStats::* counter) {
  const std::scoped_lock lock(mutex_);
  ++(stats_.*counter);
}

void PlanStore::NoteFailure(const std::string& reason) {
  const DeferredLog deferred;
  Log(LogSource::kOurs, LogLevel::kDebug, "plans on disk: " + reason);
  const std::scoped_lock lock(mutex_);
  ++stats_.failures;
  stats_.last_failure = reason;
}

std::optional<std::string> PlanStore::Load(const std::string& key) {
  const PlanStoreSettings settings = Settings();
  if (settings.directory.empty()) return std::nullopt;
  auto payload = Guard("loading a plan", [&]() -> StatusOr<std::optional<std::string>> {
    const std::string path = PathOf(settings.directory, key);
    ASSIGN_OR_RETURN(const std::optional<std::string> bytes, ReadFile(path));
    if (!bytes.has_value()) return std::optional<std::string>();
    ASSIGN_OR_RETURN(std::string found, TakePayload(*bytes, key, path));
    return std::optional<std::string>(std::move(found));
  });
  const bool is_hit = payload.ok() && payload->has_value();
  Count(is_hit ? &PlanStoreStats::hits : &PlanStoreStats::misses);
  if (is_hit) return std::move(*payload);
  if (!payload.ok()) NoteFailure(payload.status().message());
  return std::nullopt;
}

void PlanStore::Save(const std::string& key, const std::string& payload) {
  const PlanStoreSettings settings = Settings();
  const std::string& directory = settings.directory;
  if (directory.empty()) return;
  const Status status = Guard("storing a plan", [&]() -> Status {
    const std::string bytes = WritePlanFile({key, payload});
    if (static_cast<int64_t>(bytes.size()) > settings.limit_bytes) {
      return Internal("a plan of " + std::to_string(bytes.size()) +
                      " bytes is above the limit of " +
                      std::to_string(settings.limit_bytes) + " for all");
    }
    const std::string path = PathOf(directory, key);
    RETURN_IF_ERROR(WriteFile(directory, path, bytes));
    Count(&PlanStoreStats::writes);
    return Trim(directory, path, settings.limit_bytes);
  });
  if (!status.ok()) NoteFailure(status.message());
}

void PlanStore::Reject(const std::string& key, const std::string& reason) {
  const PlanStoreSettings settings = Settings();
  if (!settings.directory.empty()) Remove(PathOf(settings.directory, key));
  {
    const std::scoped_lock lock(mutex_);
    --stats_.hits;
    ++stats_.misses;
  }
  NoteFailure(reason);
}

PlanStoreUsage PlanStore::Usage() {
  const PlanStoreSettings settings = Settings();
  PlanStoreUsage usage;
  if (settings.directory.empty()) return usage;
  const auto contents =
      Guard("listing plans", [&] { return List(settings.directory); });
  if (!contents.ok()) {
    NoteFailure(contents.status().message());
    return usage;
  }
  for (const StoredFile& file : contents->plans) {
    ++usage.files;
    usage.bytes += file.bytes;
  }
  return usage;
}

void PlanStore::Clear() {
  const PlanStoreSettings settings = Settings();
  if (settings.directory.empty()) return;
  const Status status = Guard("removing plans", [&]() -> Status {
    ASSIGN_OR_RETURN(const Contents contents, List(settings.directory));
    for (const auto* files : {&contents.plans, &contents.temporaries}) {
      for (const StoredFile& file : *files) {
        if (!Remove(file.path)) return Failed("unlink", file.path, errno);
      }
    }
    return {};
  });
  if (!status.ok()) NoteFailure(status.message());
}

PlanStoreStats PlanStore::stats() const {
  const std::scoped_lock lock(mutex_);
  return stats_;
}

}  // namespace jax_cudnn
