// SPDX-License-Identifier: Apache-2.0
// A disk that fails at a chosen step of a process into which this is preloaded.
//
// Steps are the calls that change a disk, counted from arm() on. At the chosen step the
// process is killed, or else the disk is full from there on. Of what is written at that
// step, half gets there.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { kOff, kFull, kKill };

static int mode = kOff;
static int chosen;
static int steps;

// The disk fails at step `step`, from 0, of those that follow; `how` is one of the modes.
void arm(int how, int step) {
  mode = how;
  chosen = step;
  steps = 0;
}

// How many steps there were since arm(); the disk works again.
int disarm(void) {
  mode = kOff;
  return steps;
}

static bool fails(bool takes_room) {
  if (mode == kOff) return false;
  const int step = steps++;
  if (mode == kKill && step == chosen) kill(getpid(), SIGKILL);
  // What takes no room fails once only: a full disk still removes files.
  const bool is_full = mode == kFull && (step == chosen || (takes_room && step > chosen));
  if (is_full) errno = ENOSPC;
  return is_full;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int mkdir(const char* path, mode_t bits) {
  if (access(path, F_OK) != 0 && fails(true)) return -1;
  return REAL(mkdir)(path, bits);
}

int mkostemp(char* path, int flags) {
  return fails(true) ? -1 : REAL(mkostemp)(path, flags);
}

static int open_as(int (*real)(const char*, int, ...), const char* path, int flags,
                   mode_t bits) {
  if ((flags & O_CREAT) != 0 && access(path, F_OK) != 0 && fails(true)) return -1;
  return real(path, flags, bits);
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t bits = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_as(REAL(open), path, flags, bits);
}

int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t bits = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return open_as(REAL(open64), path, flags, bits);
}

ssize_t write(int file, const void* bytes, size_t count) {
  if (mode != kOff && steps == chosen && count > 1) {
    const ssize_t half = REAL(write)(file, bytes, count / 2);
    if (mode == kKill) kill(getpid(), SIGKILL);
    ++steps;
    return half;  // and the rest meets a full disk
  }
  return fails(true) ? -1 : REAL(write)(file, bytes, count);
}

int fsync(int file) { return fails(true) ? -1 : REAL(fsync)(file); }

int rename(const char* from, const char* to) {
  return fails(false) ? -1 : REAL(rename)(from, to);
}

int unlink(const char* path) { return fails(false) ? -1 : REAL(unlink)(path); }
